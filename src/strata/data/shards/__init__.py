"""Shards of registered datasets, for workers that read at their own pace."""
