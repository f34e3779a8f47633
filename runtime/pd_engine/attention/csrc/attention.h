// What Python hands over (native.py mirrors these structures field by field), and what
// each compiled variant offers.
#pragma once
#include <cstdint>

// Raised whenever a structure or a function's meaning changes.
#define PD_ATTENTION_ABI 3

extern "C" {

// One step: the same for all layers. Strides count elements.
struct PdStep {
  int32_t dtype;  // 0 float32, 1 bfloat16, 2 float16
  int32_t rows;
  int32_t threads;  // here and below 0 is OpenMP's number for this thread
  int32_t heads, kv_heads, head_dim, block_tokens;
  int64_t block_stride;      // from a block to the next
  int64_t half_stride;       // from a layer's K to its V
  const int32_t* begin;      // [rows + 1] a row's first query in the flattened batch
  const int32_t* start;      // [rows] position of that query in the sequence
  const int32_t* table_at;   // [rows] where a row's blocks begin in `tables`
  const int32_t* tables;     // the blocks of all rows, one row after the other
};

// One layer. q, k, v are [head, token, head_dim] by the given strides, dense in head_dim;
// out is [token, head, head_dim], dense.
struct PdLayer {
  void* pool;  // the layer's K in block 0
  const void *q, *k, *v;
  void* out;
  int64_t q_head, q_token, k_head, k_token, v_head, v_token;
  const float* sinks;  // [heads] or null
  float scale;
  float softcap;       // 0: none
  int32_t window;      // keys that a query sees, itself included; 0: all
};

// y = x w^T + bias, with w packed by `pack`. Strides count elements.
struct PdLinear {
  int32_t dtype, threads;
  int32_t rows, inner, outer;  // x [rows, inner], y [rows, outer]
  const void *x, *packed, *bias;  // bias may be null
  void* y;
  int64_t x_row, y_row;
};

// y = x / sqrt(mean(x^2) + epsilon) * weight, by row.
struct PdNorm {
  int32_t dtype, threads;
  int32_t rows, dim;
  int32_t one_more;  // the factor is 1 + weight, and rounded once (Gemma)
  float epsilon;
  const void *x, *weight;
  void* y;
  int64_t x_row, y_row;
};

// Rotary positions of queries and keys: of a head's first `rotary` values, each half turns
// with the other; the rest passes. Inputs [head, token, dim] by strides, dense in dim;
// outputs [token, head, dim], dense; cosines and sines [token, rotary], dense.
struct PdRotary {
  int32_t dtype, threads;
  int32_t tokens, dim, rotary;
  int32_t q_heads, k_heads;
  const void *q, *k, *cosines, *sines;
  void *q_out, *k_out;
  int64_t q_head, q_token, k_head, k_token;
};

}  // extern "C"

struct PdVariant {
  const char* name;
  void (*write)(const PdStep*, const PdLayer*);
  void (*attend)(const PdStep*, const PdLayer*);
  int32_t panel;  // outputs that lie side by side in packed weights
  void (*pack)(const PdLinear*, const void* weight, void* packed);
  void (*linear)(const PdLinear*);
  void (*norm)(const PdNorm*);
  void (*rotary)(const PdRotary*);
};
