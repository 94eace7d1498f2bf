"""The engine, its workloads, metrics and analysis; imports neither streamlit, sqlalchemy, `db` nor `app`."""
