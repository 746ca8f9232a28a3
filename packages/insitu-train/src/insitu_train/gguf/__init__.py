"""Models as GGUF files: read into a folder, written from one."""
