"""From text files to a token index: sources cut into chunks, tokenized in processes, merged and published in one step."""
