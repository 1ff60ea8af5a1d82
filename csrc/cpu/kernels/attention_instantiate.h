// The instantiations of attention's templates that each source of them makes.
#pragma once

#define PARACORE_INSTANTIATE_SCRATCH(kProducts)                                  \
  template size_t attention_forward_scratch<kProducts>(const AttentionShape&);   \
  template size_t attention_backward_scratch<kProducts>(const AttentionShape&);

#define PARACORE_INSTANTIATE_ATTENTION(T, kProducts)                      \
  template void attention_forward<T, kProducts>(                          \
      const AttentionForward<T>&, int64_t, int64_t, int64_t, std::byte*); \
  template void attention_backward<T, kProducts>(                         \
      const AttentionBackward<T>&, const BackwardPart&, std::byte*, float*);
