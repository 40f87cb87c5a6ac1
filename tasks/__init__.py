"""Operators: one family a file, its kernels in the C++ file of the same name."""

from .activation import ACTIVATIONS, Activation, ActivationGrad
from .attention import Attention, AttentionGrad
from .contract import Contract, contract
from .cross_entropy import IGNORED, CrossEntropy, CrossEntropyGrad
from .elementwise import Add, BiasAdd, Dropout, Pack, Rename, Sum, Transpose, Unpack, transpose
from .embedding import Embedding, EmbeddingGrad
from .layer_norm import LayerNorm, LayerNormGrad
from .op import Lowering, Op, Tensor
from .optimizer import SGD, AdamW, GradNorm
from .softmax import Softmax, SoftmaxGrad

__all__ = [
    "ACTIVATIONS", "IGNORED", "SGD", "Activation", "ActivationGrad", "AdamW", "Add", "Attention", "AttentionGrad",
    "BiasAdd", "Contract", "CrossEntropy", "CrossEntropyGrad", "Dropout", "Embedding", "EmbeddingGrad", "GradNorm",
    "LayerNorm", "LayerNormGrad", "Lowering", "Op", "Pack", "Rename", "Softmax", "SoftmaxGrad", "Sum", "Tensor",
    "Transpose", "Unpack", "contract", "transpose",
]  # fmt: skip
