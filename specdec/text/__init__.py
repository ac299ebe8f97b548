"""Text to ids and back beyond llama2.c: other tokenizers, templates, conversations, and words of what was decoded."""
