"""What a person sees: views of events on a terminal, what stands in one line, and how it all ends. No models."""
