"""Alembic migrations, applied when a database is opened."""
