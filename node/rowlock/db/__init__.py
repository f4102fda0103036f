"""PostgreSQL: the schema, its migrations, and one typed method for each move of the protocol."""
