"""Token streams: text on disk, tokenized once into a mapped index, read in any order from any position.

`builder` makes an index, `index` reads it, `freshness` tells whether it still fits its sources, `sequences`
orders it for training and `dataset` hands it to PyTorch.
"""
