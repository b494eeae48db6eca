"""robustkpca: how robust is a vision transformer, and does attention with robust principal components make it more so?"""

__version__ = "0.1.0"
