"""Claims of the literature, each measured by one command: `foredraft reproduce`."""
