"""States in other tools' formats, read and written tensor by tensor: `.pt`, safetensors, Hugging Face and DCP folders."""
