"""The lab: what is claimed, measured."""
