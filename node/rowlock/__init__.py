"""Large batch jobs on many pods, with PostgreSQL as the only coordinator."""
