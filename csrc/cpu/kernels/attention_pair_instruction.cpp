// Attention by the instruction of AVX512-BF16: setup.py lets the compiler use it here, in the AVX512 variant, and
// the launcher asks the processor before it calls. The other variants of this file are empty.
#include "attention.h"

#ifdef __AVX512BF16__

#include "attention_backward.h"
#include "attention_forward.h"
#include "attention_instantiate.h"

namespace paracore {
namespace CPU_CAPABILITY {

PARACORE_INSTANTIATE_SCRATCH(Products::kPairInstruction)
PARACORE_INSTANTIATE_ATTENTION(uint16_t, Products::kPairInstruction)

}  // namespace CPU_CAPABILITY
}  // namespace paracore

#endif
