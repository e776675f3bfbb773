"""An index of a dump: SQLite tables beside it, made once and kept up to date."""
