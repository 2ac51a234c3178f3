"""The short convolution in torch, for any device."""
