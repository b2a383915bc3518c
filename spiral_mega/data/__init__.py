"""Problems in, in a known order: reading, filtering, sampling."""
