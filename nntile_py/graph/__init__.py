"""Logical operators on tensors with named axes; fusion, lowering, optimizers. Pure data: no StarPU here."""
