//! `fully_sharded_bucket_space`: buckets in the parts of data-parallel ranks, padding included.
//!
//! The fixture is Megatron-Core 0.9.0's, two ranks and several buckets. 0.11 to 0.14 cannot save
//! this form as `torch_dist` where a rank has several pieces of a bucket.

use dcp_core::Region;
use dcp_core::metadata::Entry;
use dcp_jobs::JobOptions;
use dcp_jobs::view::{Assembled, Piece, PieceFrom};
use dcp_megatron::optimizer::{OptimizerFormat, per_parameter};

use crate::optimizer::{open, shown, tensors};
use crate::support::{block_on, tensors_in};

const BUCKET_SPACE: &str = "v09_gpt_dp2_fs_bucket_space";

/// `by_parameter.safetensors` is what Megatron's optimizer had of each parameter when it saved.
#[test]
fn buckets_with_their_padding_hold_what_megatron_had() {
    let shown = shown(BUCKET_SPACE);
    assert_eq!(shown.report.from, OptimizerFormat::FullyShardedBucketSpace);
    assert!(shown.report.is_complete(), "{:?}", shown.report);
    let layout = shown.report.layout.as_ref().unwrap();
    assert_eq!((shown.report.params, layout.by_value), (8, 8));
    assert!(layout.without_state.is_empty(), "{layout:?}");
    let found = tensors(&shown.source, |fqn| fqn.starts_with("optimizer.state."));
    assert_eq!(found, tensors_in(BUCKET_SPACE, "by_parameter.safetensors"));
}

/// The embedding is last in its buffer, where padding begins behind it.
#[test]
fn what_is_not_found_before_the_padding_is_kept() {
    let checkpoint = open(BUCKET_SPACE);
    let metadata = block_on(checkpoint.source().metadata()).unwrap();
    let job = JobOptions::default();
    let parts = [checkpoint.source().clone()];
    for has_lengths in [true, false] {
        let mut view = block_on(Assembled::builder(&parts, &job)).unwrap();
        for (at, (fqn, entry)) in metadata.iter().enumerate() {
            let fqn = &**fqn;
            match entry {
                Entry::Tensor(tensor) if fqn == "embedding.word_embeddings.weight" => {
                    // Eight rows of another weight.
                    let from = Region::new([0, 0, 0], [1, 8, 8]).unwrap();
                    let entry = metadata.index_of("decoder.layers.mlp.linear_fc1.weight").unwrap();
                    let from = PieceFrom::Reshaped { part: 0, entry, region: from };
                    let region = Region::full(tensor.shape.clone()).unwrap();
                    let pieces = vec![Piece { region, from }];
                    let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
                    view.tensor(fqn, None, dtype, shape, pieces).unwrap();
                }
                Entry::Object(_) if !has_lengths && fqn.contains("per_bucket_numel_unpadded") => {}
                _ => view.pass(fqn, None, 0, at).unwrap(),
            }
        }
        let source = view.finish().unwrap();
        let shown = block_on(per_parameter(&source, checkpoint.common(), &job)).unwrap();
        let layout = shown.report.layout.as_ref().unwrap();
        let unresolved: Vec<_> = layout.unresolved.iter().map(|(fqn, _)| &**fqn).collect();
        assert_eq!(unresolved, ["embedding.word_embeddings.weight"], "{has_lengths}");
        assert_eq!(layout.unknown.len(), 1, "{has_lengths}: {layout:?}");
        let kept = block_on(shown.source.metadata()).unwrap();
        assert!(metadata.iter().all(|(fqn, _)| kept.get(fqn).is_some() || !has_lengths));
    }
}
