"""Multi-CLS models (arXiv:2210.05043), and the code that the three stages share.

`import multicls.modeling_multicls` registers the model type "multicls" with transformers' auto classes. torch and
transformers are imported only when they are needed, so that settings and corpus load fast.
"""

__version__ = "0.3.0"
