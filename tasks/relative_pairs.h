// Terms of attention scores that depend on the distance between a query and a key, for blocks of pairs of one head.
// A term is a product of a query, or of a key, with the embedding of a distance (attention_relative.py).
#pragma once
#include <algorithm>
#include <vector>

#include "common.h"

namespace nntile::relative {

// permute returns in lane k lane from[k] - first of x.
#ifdef CPU_CAPABILITY_AVX512
constexpr bool kPermutes = true;
inline Vec<float> permute(const Vec<float>& x, const int32_t* from, int32_t first) {
  return _mm512_permutexvar_ps(_mm512_sub_epi32(_mm512_loadu_si512(from), _mm512_set1_epi32(first)), x);
}
#elif defined(CPU_CAPABILITY_AVX2)
constexpr bool kPermutes = true;
inline Vec<float> permute(const Vec<float>& x, const int32_t* from, int32_t first) {
  const auto at = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm256_permutevar8x32_ps(x, _mm256_sub_epi32(at, _mm256_set1_epi32(first)));
}
#else
constexpr bool kPermutes = false;
inline Vec<float> permute(const Vec<float>& x, const int32_t*, int32_t) { return x; }
#endif

// Positions along `relative` by distance. They do not decrease, and increase by at most one.
class Index {
 public:
  explicit Index(const at::Tensor& index)
      : data_(static_cast<size_t>(index.numel() + Vec<float>::size())), origin_(index.numel() / 2) {
    std::copy_n(index.data_ptr<int64_t>(), index.numel(), data_.begin());
  }
  // Returns the entry of distance 0. A vector may be loaded from each entry.
  const int32_t* origin() const { return data_.data() + origin_; }

 private:
  std::vector<int32_t> data_;
  int64_t origin_;
};

// Products of one head with embeddings, [positions, relative], or gradients of these products.
template <class T>
struct HeadProducts {
  T* data;
  int64_t step;  // from a position to the next
};

// Scores of a block of pairs, or gradients of these scores. Row 0 is the block's first query, column 0 its first key.
template <class T>
struct BlockScores {
  T* data;
  int64_t step;  // from a query to the next
};

// A tile of pairs. Pair (r, k): the query r places before the tile's last query, and the tile's key number k; r < rows
// <= side, k < keys <= side. scores: of the last query. index[k + r]: the pair's position along `relative`.
template <class Score, class Product>
struct Pairs {
  static constexpr int64_t side = Vec<std::remove_const_t<Score>>::size();

  Score* scores;
  int64_t score_step, rows, keys;
  const int32_t* index;

  Score& score(int64_t r, int64_t k) const { return scores[k - r * score_step]; }
  // Whether all distances of the tile have positions of their own.
  bool straight() const { return index[keys + rows - 2] - index[0] == keys + rows - 2; }
  bool full() const { return rows == side && keys == side; }
};

// Adds products, times a factor, to scores.
template <class T>
struct AddTerms {
  using Value = const T;
  using Tile = Pairs<T, const T>;
  T factor;

  void add(T* scores, const Vec<T>& products, int64_t count) const {
    at::vec::fmadd(Vec<T>(factor), products, load(scores, count)).store(scores, static_cast<int>(count));
  }
  // Returns x[from[k]] for each k below count.
  static Vec<T> gather(const T* x, const int32_t* from, int64_t count) {
    if constexpr (kPermutes && std::is_same_v<T, float>)
      return permute(load(x + from[0], from[count - 1] - from[0] + 1), from, from[0]);
    alignas(64) T found[Vec<T>::size()];
    for (int64_t k = 0; k < count; ++k) found[k] = x[from[k]];
    return load(found, count);
  }

  // products: of the tile's last query; those of the query before it begin `step` earlier.
  void of_queries(const Tile& tile, const T* products, int64_t step) const {
    const bool straight = tile.straight();
    for (int64_t r = 0; r < tile.rows; ++r, products -= step) {
      const auto* from = tile.index + r;
      add(tile.scores - r * tile.score_step,
          straight ? load(products + *from, tile.keys) : gather(products, from, tile.keys), tile.keys);
    }
  }

  // products: of the tile's first key; those of the next key begin `step` later.
  void of_keys(const Tile& tile, const T* products, int64_t step) const {
    constexpr int64_t side = Tile::side;
    alignas(64) T of_keys[side * side], of_queries[side * side];
    const T* from = of_keys;
    int64_t from_step = side;
    if (tile.full() && tile.straight()) {
      from = products + tile.index[0];
      from_step = step + 1;
    } else {
      for (int64_t k = 0; k < tile.keys; ++k)
        gather(products + k * step, tile.index + k, tile.rows).store(of_keys + k * side, static_cast<int>(tile.rows));
    }
    at::vec::transpose_mxn(from, from_step, of_queries, side, static_cast<int>(side), static_cast<int>(side));
    for (int64_t r = 0; r < tile.rows; ++r)
      add(tile.scores - r * tile.score_step, load(of_queries + r * side, tile.keys), tile.keys);
  }
};

// Adds gradients of scores to the gradients of products.
template <class T>
struct SumTerms {
  using Value = T;
  using Tile = Pairs<const T, T>;

  void of_queries(const Tile& tile, T* sums, int64_t step) const {
    if (tile.straight()) {
      for (int64_t r = 0; r < tile.rows; ++r) {
        T* to = sums - r * step + tile.index[r];
        add_rows(to, to, tile.scores - r * tile.score_step, tile.keys);
      }
      return;
    }
    // Queries in turns: neighbouring keys may have the same position, whose additions wait for each other.
    for (int64_t k = 0; k < tile.keys; ++k)
      for (int64_t r = 0; r < tile.rows; ++r) sums[tile.index[k + r] - r * step] += tile.score(r, k);
  }

  void of_keys(const Tile& tile, T* sums, int64_t step) const {
    if (tile.full() && tile.straight()) {
      constexpr int side = static_cast<int>(Tile::side);
      alignas(64) T of_keys[side * side];
      at::vec::transpose_mxn(tile.scores, -tile.score_step, of_keys, side, side, side);
      T* to = sums + tile.index[0];
      for (int64_t k = 0; k < side; ++k, to += step + 1) add_rows(to, to, of_keys + k * side, side);
      return;
    }
    for (int64_t r = 0; r < tile.rows; ++r)
      for (int64_t k = 0; k < tile.keys; ++k) sums[k * step + tile.index[k + r]] += tile.score(r, k);
  }
};

// A block of pairs of one head: queries [first, first + rows) and keys [from, end). origin: see Index.
struct Block {
  const int32_t* origin;
  int64_t first, rows, from, end;

  template <class T, class Score, class Terms>
  [[gnu::flatten]] void of_queries(const HeadProducts<T>& products, const BlockScores<Score>& scores,
                                   const Terms& terms) const {
    for_tiles<T>(scores, [&](const auto& tile, int64_t last, int64_t) {
      terms.of_queries(tile, products.data + last * products.step, products.step);
    });
  }
  template <class T, class Score, class Terms>
  [[gnu::flatten]] void of_keys(const HeadProducts<T>& products, const BlockScores<Score>& scores,
                                const Terms& terms) const {
    for_tiles<T>(scores, [&](const auto& tile, int64_t, int64_t key) {
      terms.of_keys(tile, products.data + key * products.step, products.step);
    });
  }

 private:
  // Calls f(tile, last query, first key) for all tiles of the block.
  template <class T, class Score, class F>
  void for_tiles(const BlockScores<Score>& scores, F f) const {
    constexpr int64_t side = Pairs<Score, T>::side;
    for (int64_t key = from; key < end; key += side)
      for (int64_t row = 0; row < rows; row += side) {
        const auto height = std::min(side, rows - row), last = row + height - 1;
        auto* of_last = scores.data + last * scores.step + key - from;
        f(Pairs<Score, T>{of_last, scores.step, height, std::min(side, end - key), origin + key - (first + last)},
          first + last, key);
      }
  }
};

}  // namespace nntile::relative
