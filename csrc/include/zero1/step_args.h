// The plain structs that kernels take: raw pointers, int64 counts and the tables of the layout. No Torch type below
// here.
#pragma once

#include <cstdint>

#include "adam_math.h"

namespace zero1 {

// Elements per chunk. Every parameter starts at a multiple of it in its flat buffer and every slice holds whole chunks,
// so a chunk belongs to one segment, 16-byte accesses never straddle two, and the norm does not depend on the
// partition.
constexpr int64_t kChunk = 128;
constexpr int kMaxBuffers = 3;

enum DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum MasterMode : int32_t {
  kMasterOwn = 0,    // fp32 parameter: its own master
  kMasterFp32 = 1,   // 16-bit parameter, fp32 master
  kMasterSplit = 2,  // bf16 parameter + 16-bit remainder
};

// The part of one parameter that lies in this rank's slice of one bucket: a row of 8 int64 in device memory. All
// `*_begin` are element offsets and multiples of kChunk.
struct Segment {
  int64_t shard_begin;  // in exp_avg, exp_avg_sq
  int64_t numel;
  int64_t grad_begin;    // in buffers[buffer].grad
  int64_t param_begin;   // in buffers[buffer].param
  int64_t master_begin;  // in master or remainder, as the buffer's mode says; unused for kMasterOwn
  int64_t max_begin;     // in max_exp_avg_sq; -1: the parameter keeps none
  int64_t param;         // row in the scalars and in `edited`
  int64_t buffer;        // index into buffers
};
static_assert(sizeof(Segment) == 64, "the Python side writes rows of 8 int64");

// chunk_segment[c]: the segment of shard elements [c * kChunk, (c + 1) * kChunk), or -1 where there is only padding.
struct SegmentTable {
  const Segment* segments;
  const int32_t* chunk_segment;
  int64_t chunks;
};

// How many elements each place has that a segment may point to. On the CPU the tables can be looked at, so that a wrong
// one is an error there and not a write out of bounds.
struct TableSizes {
  static constexpr int64_t kUnused = -1;  // the op does not go there
  int64_t segments = 0, buffers = 0;
  int64_t grads[kMaxBuffers] = {kUnused, kUnused, kUnused};
  int64_t params[kMaxBuffers] = {kUnused, kUnused, kUnused};
  int64_t master = kUnused, remainder = kUnused, max_exp_avg_sq = kUnused;
  int64_t rows = kUnused;  // of the scalars, or of `edited`
};

struct FlatBuffer {
  void* param;
  const void* grad;
  int32_t dtype;   // DType
  int32_t master;  // MasterMode
};

struct AdamStepArgs {
  SegmentTable table;
  FlatBuffer buffers[kMaxBuffers];
  float* master;
  uint16_t* remainder;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;
  const AdamScalars* scalars;
};

struct RefreshMastersArgs {
  SegmentTable table;
  FlatBuffer buffers[kMaxBuffers];
  float* master;
  uint16_t* remainder;
  const uint8_t* edited;  // one byte per parameter: nonzero if its weights may have been changed from outside
};

// A sum of squares that is exact and so the same for every partition. Chunk sums (fp32, a fixed tree) are added as
// integers: words 0..9 are 32-bit limbs kept in int64, in units of 2^-149, least significant first.
constexpr int kNormLimbs = 10;
enum NormWord {
  kNormNonFinite = 10,  // chunks that hold an infinity or a NaN
  kNormNaN = 11,        // chunks that hold a NaN
  kNormOverflow = 12,   // finite chunks whose sum of squares is beyond fp32
};
constexpr int kNormWords = 16;

struct GradNormArgs {
  SegmentTable table;
  FlatBuffer buffers[kMaxBuffers];
  int64_t* norm;  // kNormWords, added to
};

// out = (sum over ranks, in rank order, of slice * scale) / divisor, in fp32, rounded once; the norm is that of the
// fp32 means, before rounding. `scale` is a power of two that keeps the sum below the largest fp32 value; `divisor`
// undoes it and takes the mean.
struct SumSlicesArgs {
  const void* received;  // [world or world - 1, numel]
  const void* own;       // this rank's slice, if it is not among the received ones; else null
  void* out;
  int64_t numel;
  int64_t rank;
  int64_t world;
  float scale;
  float divisor;
  int32_t dtype_in;
  int32_t dtype_out;
  int64_t* norm;  // kNormWords, added to; null: no norm. Padding holds zeros and adds nothing.
};

// What must be equal on all ranks travels as a fact: a number of up to 32 bits (or 2^32 itself) as its 16-bit halves
// and their squares, so that the sums over ranks tell whether all were equal (control_math.h).
constexpr int kFactWords = 4;

// The control vector: int64, summed over ranks by one all-reduce. The first kNormWords are a norm (above); the host
// writes the words from kControlHost on; then come the had-a-gradient flags, four int16 to a word.
enum ControlWord {
  kControlConditions = 13,      // ranks that found something that must stop the step
  kControlFoundInf = 14,        // ranks whose loss scaler found an infinity
  kControlScale = 16,           // a fact: grad_scale's bits + 1, or 0 for none
  kControlHost = 20,            // here begins what the host writes
  kControlModified = 20,        // ranks whose gradients changed after they were reduced; reducing them again clears it
  kControlInBackward = 21,      // ranks whose message comes from the end of a backward
  kControlInClip = 22,          // ranks that are in clip_grad_norm_
  kControlNonFiniteGrads = 23,  // ranks that saw a non-finite gradient at the end of a backward
  kControlBackwardRanks = 24,   // ranks that made a backward pass outside no_sync(); over those ...
  kControlBackwards = 25,       // ... a fact: their number of such passes
  kControlFacts = 29,           // a fact: a digest of all else that must be equal
  kControlFlags = 36,
};
constexpr int kSkippedWords = 3;

struct PackControlArgs {
  const int64_t* norms;  // [rows, kNormWords]
  int64_t rows;
  const float* found_inf;   // null: none
  const float* grad_scale;  // null: none
  int64_t* control;         // words 0..kControlHost-1 are written, kControlConditions kept
};

struct ClipFactorArgs {
  const int64_t* control;
  const float* grad_scale;  // null: 1
  double max_norm;
  float* clip;  // [2]: factor, total_norm
};

// One row of 8 doubles per parameter group.
struct GroupOptions {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t mode;        // GroupMode
  const void* lr_at;   // where lr lives on the device (capturable); null: the field above
  int64_t lr_is_fp64;  // type of *lr_at: 0 fp32, 1 fp64
};
static_assert(sizeof(GroupOptions) == 64, "the Python side writes rows of 8 words");
enum GroupMode : int64_t { kGroupAmsgrad = 1, kGroupMaximize = 2, kGroupDecoupled = 4 };

struct StepControlArgs {
  const int64_t* control;
  int64_t params;
  int64_t world;
  const int32_t* param_group;  // [params]
  const GroupOptions* groups;
  const float* grad_scale;  // null: 1
  const float* clip;        // [2] as clip_factor wrote it; null: no clipping
  int32_t skip_nonfinite;   // 32 bits each: no padding whose bytes nobody has written
  int32_t scaled;           // a loss scaler is at work: a non-finite gradient always skips
  int64_t* steps;           // [params]
  AdamScalars* scalars;     // [params]
  int64_t* skipped;         // [2]: steps skipped in all; whether the last one was
  int64_t* stopped;         // whether any step was ever stopped: the last of kSkippedWords, or null
};

}  // namespace zero1
