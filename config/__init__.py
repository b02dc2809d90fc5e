"""Configuration: the command line's parser, presets, and the rules that settle what was left open."""
