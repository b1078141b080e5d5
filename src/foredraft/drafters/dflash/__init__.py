"""DFlash: a draft head that fills a block of masked tokens in one pass."""
