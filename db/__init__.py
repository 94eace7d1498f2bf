"""Runs in a SQL database: models, migrations, the repository that holds every query, and the recorder."""
