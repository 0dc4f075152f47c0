"""Weight formats: how the weights of one Linear are stored, packed and multiplied."""
