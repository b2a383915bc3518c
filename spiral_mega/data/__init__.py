"""Problems: readers, row schemas, filters, and the sampler that fixes their order."""
