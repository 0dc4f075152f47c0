"""Rows of an int8 table on a CPU; `kernels/embedding_rows.py` says what it computes."""

from torch import Tensor

from kernels.cpu.compiler import compiled, floats, int8s, int64s


@compiled()
def _rows_kernel(values_ptr, scale_ptr, indices_ptr, out_ptr, table_rows, num_rows, size):
    values, scale = int8s(values_ptr, table_rows, size), floats(scale_ptr, 1, table_rows)[0]
    indices, out = int64s(indices_ptr, 1, num_rows)[0], floats(out_ptr, num_rows, size)
    for row in range(num_rows):
        index = indices[row]
        for i in range(size):
            out[row, i] = values[index, i] * scale[index]


def embedding_rows(scale: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    table_rows, size = values.shape
    out = scale.new_empty(len(indices), size)
    pointers = [tensor.data_ptr() for tensor in (values, scale, indices, out)]
    _rows_kernel(*pointers, table_rows, len(indices), size)
    return out
