"""Models beside the paper's, and variants of its layers; they share the interface of core/transformer."""
