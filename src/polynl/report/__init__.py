"""`polynl report`: results as one page that opens from disk, with no network."""
