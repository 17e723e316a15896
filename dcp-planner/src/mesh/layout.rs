//! The division of a tensor over a mesh: PyTorch's DTensor, without its elements.

use std::collections::BTreeMap;

use dcp_core::error::StateProblem;
use dcp_core::{DType, Dims, HostMemory, PlanError, Rank, Region, Shard, Tensor, TensorView};

use super::{DeviceMesh, TensorPlacement, local_regions, recorded_box};

/// A mesh with one placement per axis: how a `DTensor` is divided.
///
/// ```
/// use dcp_core::DType;
/// use dcp_planner::mesh::{DeviceMesh, MeshLayout, TensorPlacement};
///
/// // FSDP2 over 2 ranks, and over 2 ranks of tensor parallelism.
/// let shard = TensorPlacement::StridedShard { axis: 0, split_factor: 2 };
/// let layout = MeshLayout::new(DeviceMesh::new([2, 2])?, [shard, TensorPlacement::Shard(0)]);
/// let tensor = layout.zeros("layers.0.weight", DType::BFloat16, [8, 3], 1)?;
/// assert_eq!(tensor.shards()[0].region().to_string(), "[4:6, 0:3]");
/// # Ok::<(), dcp_core::PlanError>(())
/// ```
#[doc(alias = "DTensorSpec")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MeshLayout {
    mesh: DeviceMesh,
    placements: Vec<TensorPlacement>,
}

impl MeshLayout {
    /// A placement for each axis of `mesh`.
    #[must_use]
    pub fn new(mesh: DeviceMesh, placements: impl Into<Vec<TensorPlacement>>) -> Self {
        Self { mesh, placements: placements.into() }
    }

    /// The regions of tensor `fqn` that `rank` holds; none outside the mesh.
    ///
    /// # Errors
    ///
    /// [`StateProblem::PartialSum`] with the tensor's name, where a placement is partial;
    /// [`PlanError::Placement`] when placements, mesh and shape do not fit together.
    pub fn regions(&self, fqn: &str, shape: &[u64], rank: Rank) -> Result<Vec<Region>, PlanError> {
        if self.placements.contains(&TensorPlacement::Partial) {
            return Err(StateProblem::PartialSum.of(fqn));
        }
        let Some(coordinate) = self.mesh.coordinate(rank) else { return Ok(Vec::new()) };
        local_regions(shape, &self.mesh, &coordinate, &self.placements)
    }

    /// Tensor `fqn` of zeros in this layout, as `rank` holds it.
    ///
    /// # Errors
    ///
    /// As [`regions`](Self::regions), and when there is no memory for it.
    pub fn zeros(
        &self,
        fqn: &str,
        dtype: DType,
        shape: impl Into<Dims>,
        rank: Rank,
    ) -> Result<Tensor, PlanError> {
        let shape = shape.into();
        let regions = self.regions(fqn, &shape, rank)?;
        Ok(Tensor::zeros_sharded(dtype, shape, regions)?)
    }

    /// Tensor `fqn` in this layout, of which `rank` holds the elements in `memory`: its local
    /// tensor, row-major.
    ///
    /// # Errors
    ///
    /// As [`regions`](Self::regions), and when the memory has another size.
    pub fn tensor(
        &self,
        fqn: &str,
        dtype: DType,
        shape: impl Into<Dims>,
        rank: Rank,
        memory: impl Into<HostMemory>,
    ) -> Result<Tensor, PlanError> {
        let (shape, memory) = (shape.into(), memory.into());
        let regions = self.regions(fqn, &shape, rank)?;
        let shards = match (&*regions, self.mesh.coordinate(rank)) {
            ([region], _) => vec![Shard::new(dtype, region.clone(), memory)?],
            ([], _) | (_, None) => Vec::new(),
            (_, Some(coordinate)) => {
                let bounds = recorded_box(&shape, &self.mesh, &coordinate, &self.placements)?;
                // The check of its size.
                let local = Shard::new(dtype, Region::full(bounds.sizes().clone())?, memory)?;
                let view = local.host_view(fqn)?;
                let part = |region| part(view, &regions, region);
                regions.iter().map(part).collect::<Result<_, _>>()?
            }
        };
        Ok(Tensor::sharded(dtype, shape, shards)?)
    }
}

/// The shard of one of several regions, which a local tensor has one after the other on each axis.
fn part(local: &TensorView, all: &[Region], region: &Region) -> Result<Shard, PlanError> {
    let before = |axis: usize| -> u64 {
        let starts: BTreeMap<u64, u64> =
            all.iter().map(|other| (other.offsets()[axis], other.sizes()[axis])).collect();
        starts.range(..region.offsets()[axis]).map(|(_, len)| len).sum()
    };
    let offsets: Vec<u64> = (0..region.ndim()).map(before).collect();
    let inner = Region::new(offsets, region.sizes().clone())?;
    Ok(Shard::with_view(region.clone(), local.narrow(&inner)?)?)
}
