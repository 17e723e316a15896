//! Tensors over meshes, besides what the vectors and interop compare with DTensor.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use dcp_core::error::StateProblem;
use dcp_core::{DType, Region, Shard};
use dcp_planner::mesh::{DeviceMesh, MeshLayout, TensorPlacement, local_regions};

fn region(offsets: &[u64], sizes: &[u64]) -> Region {
    Region::new(offsets, sizes).unwrap()
}

#[test]
fn t07_a_strided_shard_alone_is_several_boxes() {
    let mesh = DeviceMesh::new([2]).unwrap();
    let placements = [TensorPlacement::StridedShard { axis: 0, split_factor: 2 }];
    let regions = local_regions(&[8], &mesh, &[1], &placements).unwrap();
    assert_eq!(regions, [region(&[2], &[2]), region(&[6], &[2])]);
    // Its local tensor has the pieces one after the other, on both axes.
    let layout = MeshLayout::new(
        DeviceMesh::new([2, 2]).unwrap(),
        [0, 1].map(|axis| TensorPlacement::StridedShard { axis, split_factor: 2 }),
    );
    let local: Vec<u8> = (0..16).collect();
    let tensor = layout.tensor("w", DType::UInt8, [8, 8], 3, local.clone()).unwrap();
    let held = |shard: &Shard| {
        let bytes = shard.view().unwrap().payload().unwrap().to_bytes().to_vec();
        (shard.region().to_string(), bytes)
    };
    let held: Vec<_> = tensor.shards().iter().map(held).collect();
    let expected = [
        ("[2:4, 2:4]", vec![0, 1, 4, 5]),
        ("[2:4, 6:8]", vec![2, 3, 6, 7]),
        ("[6:8, 2:4]", vec![8, 9, 12, 13]),
        ("[6:8, 6:8]", vec![10, 11, 14, 15]),
    ];
    assert_eq!(held, expected.map(|(region, bytes)| (region.to_owned(), bytes)));
    assert!(layout.tensor("w", DType::UInt8, [8, 8], 3, local[1..].to_vec()).is_err());
}

#[test]
fn a_partial_placement_is_refused_by_name() {
    let mesh = DeviceMesh::new([2, 2]).unwrap();
    let placements = [TensorPlacement::Shard(0), TensorPlacement::Partial];
    let layout = MeshLayout::new(mesh, placements);
    let error = layout.zeros("grad.w", DType::Float32, [4], 0).unwrap_err();
    assert_eq!(error, StateProblem::PartialSum.of("grad.w"));
    assert!(error.to_string().contains("\"grad.w\""), "{error}");
}

#[test]
fn a_mesh_of_some_ranks_leaves_the_others_without_shards() {
    let mesh = DeviceMesh::of_ranks([2], vec![5, 3]).unwrap();
    let layout = MeshLayout::new(mesh, [TensorPlacement::Shard(0)]);
    let of = |rank| layout.regions("w", &[4], rank).unwrap();
    assert_eq!((of(5), of(3)), (vec![region(&[0], &[2])], vec![region(&[2], &[2])]));
    assert_eq!(of(0), []);
    assert!(layout.tensor("w", DType::UInt8, [4], 0, Vec::new()).unwrap().shards().is_empty());
    assert!(DeviceMesh::of_ranks([2], vec![3, 3]).is_err());
    assert!(DeviceMesh::of_ranks([2], vec![3]).is_err());
}
