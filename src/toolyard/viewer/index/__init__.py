"""The index of a dump: SQLite tables next to it, built once and kept up to date."""
