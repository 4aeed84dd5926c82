// activation(gate) * up, the middle of a gated feed-forward layer (Shazeer, 2020).
//
// Work: one thread per 16 bytes of output. Traffic: gate and up read once, the product written once.
//
// Module constant: SCALAR.
#include "scalar.cuh"

#define THREADS 256

typedef Vector<SCALAR> Piece;

struct Silu {
  __device__ __forceinline__ float operator()(float z) const { return z / (1.0f + expf(-z)); }
};
// Hendrycks and Gimpel, 2016: exact, and the approximation that checkpoints name gelu_pytorch_tanh. Written with erfc
// and a sigmoid, 1 + tanh(x) = 2 / (1 + exp(-2 x)): 1 + erf and 1 + tanh cancel for negative z.
struct GeluErf {
  __device__ __forceinline__ float operator()(float z) const {
    return 0.5f * z * erfcf(z * -0.7071067811865476f);
  }
};
struct GeluTanh {
  __device__ __forceinline__ float operator()(float z) const {
    return z / (1.0f + expf(-1.5957691216057308f * (z + 0.044715f * z * z * z)));
  }
};

template <class Activation>
__device__ __forceinline__ void gate_and_multiply(SCALAR* out, const SCALAR* gate_up, int size, i64 num_pieces) {
  const i64 piece = i64(blockIdx.x) * THREADS + threadIdx.x;
  if (piece >= num_pieces) return;
  const i64 start = piece * Piece::size, row = start / size, column = start % size;
  Piece gate, up;
  gate.load(gate_up + row * 2 * size + column);
  up.load(gate_up + row * 2 * size + size + column);
#pragma unroll
  for (int i = 0; i < Piece::size; i++) gate.values[i] = Activation()(gate.values[i]) * up.values[i];
  gate.store(out + start);
}

// out: [num_tokens, size]; gate_up: [num_tokens, 2 * size], the gate first; size a multiple of Vector::size;
// num_pieces: num_tokens * size / Vector::size. Grid: (ceil(num_pieces / THREADS)).
KERNEL(THREADS, 48)
silu_mul(SCALAR* out, const SCALAR* gate_up, int size, i64 num_pieces) {
  gate_and_multiply<Silu>(out, gate_up, size, num_pieces);
}

KERNEL(THREADS, 48)
gelu_mul(SCALAR* out, const SCALAR* gate_up, int size, i64 num_pieces) {
  gate_and_multiply<GeluErf>(out, gate_up, size, num_pieces);
}

KERNEL(THREADS, 48)
gelu_tanh_mul(SCALAR* out, const SCALAR* gate_up, int size, i64 num_pieces) {
  gate_and_multiply<GeluTanh>(out, gate_up, size, num_pieces);
}
