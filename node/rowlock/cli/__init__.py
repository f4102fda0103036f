"""The commands of `rowlock`: each module parses one command, calls the layers below, and prints."""
