// Asks for a block of memory ahead of its use: small pages stop the hardware prefetcher at every boundary. Measured on
// two cores with AVX-512, 4 KiB pages: 2048 bytes ahead and blocks of 1 KiB or less bring adam_step from 0.79 to 0.91
// of a bare loop over the same streams. See each_level.h.

template <int64_t count, class T>
static __attribute__((always_inline)) inline void prefetch(const T* x) {
  constexpr int64_t kAhead = 2048, kLine = 64;
  const char* at = reinterpret_cast<const char*>(x) + kAhead;
  for (int64_t line = 0; line < count * static_cast<int64_t>(sizeof(T)); line += kLine) __builtin_prefetch(at + line);
}
