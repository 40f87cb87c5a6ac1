"""Triton kernels that replace those of an operator: attention over packed sequences (segments) as grouped products.

After `register()`, tasks of `model.attention: segments` launch these kernels on CUDA:

    import grouped_attention  # with examples/ on sys.path

    grouped_attention.register()
    nt.Trainer(nt.models.GPT2(nt.models.GPT2Config(attention="segments")), batch=8, seq=1024)

Results are the same; the kernels of nntile_py are faster. Grouped products are matrix products of different sizes in
one launch, here those of all sequences and heads. They write and read each element of the scores: 4 bytes in bf16 for
4 * head_dim flop. With head_dim 64 these are 256 flop, but an H200 computes 820 flop (990 Tflop/s) in the time that it
moves 4 bytes (4.8 TB/s). Measured on an H200, grouped products take 2.4 to 3.2 times as long as nntile_py's kernels of
`attention: segments`, which keep scores on chip (experiments/segments.py).
"""

from nntile_py.tasks import launch


def register() -> None:
    """Replace the kernels of attention over segments, and of its gradient, in this process."""
    from .attention_triton import forward, gradient

    launch.load()  # registers the launches of nntile_py, which the next lines replace
    launch.launches("attention_segments")(forward)
    launch.launches("attention_segments_grad")(gradient)
