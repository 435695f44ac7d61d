"""The paper, plain: from text files to a translation, in modules to be read in the order of DESIGN."""
