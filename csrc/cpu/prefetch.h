// Asks for the block that lies kAhead bytes further on; see each_level.h.

template <int64_t count, class T>
static __attribute__((always_inline)) inline void prefetch(const T* x) {
  constexpr int64_t kAhead = PF, kLine = 64;
  const char* at = reinterpret_cast<const char*>(x) + kAhead;
  for (int64_t line = 0; line < count * static_cast<int64_t>(sizeof(T)); line += kLine) __builtin_prefetch(at + line);
}
