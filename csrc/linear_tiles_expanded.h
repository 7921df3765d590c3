// Linears on weights that are expanded to BF16, by tiles (tiles.h).
#pragma once

#include "linear_expanded.h"
#include "linear_tiles_dense.h"

namespace octavo {
namespace {  // see numbers.h

template <class Isa, class Tiles>
class ExpandedTiles : public DenseTiles<Isa, Tiles> {
 public:
  explicit ExpandedTiles(const OctavoLinearCall& call)
      : DenseTiles<Isa, Tiles>(call),
        layout_(expanded_layout(*call.linear)),
        expand_(bf16_expander(*call.linear)) {}

  void multiply_rows(int64_t begin, int64_t end, int64_t panel) const {
    const char* const weights = expand_panel(*this->call_.linear, layout_, expand_, panel);
    this->multiply_panel(begin, end, panel, weights, 0);
  }

 private:
  const ExpandedLayout layout_;
  ExpandBlock* const expand_;
};

template <class Isa, class Tiles>
void multiply_expanded_tiles(const void* arguments) {
  const typename Tiles::Session session{TileShapes()};
  multiply<ExpandedTiles<Isa, Tiles>>(arguments);
}

}  // namespace
}  // namespace octavo
