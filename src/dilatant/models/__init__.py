"""Models: units, their layers, and the cut of Hugging Face models into stages."""
