//! Saves of an unchanged structure reuse the plan.

use std::sync::Arc;

use dcp_core::{
    CheckpointMetadata, Collective, DType, StateDict, Storage, StorageReader as _, Tensor,
};
use dcp_engine::{SaveSummary, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter, FileLayout, Zstd};
use dcp_planner::{DedupPolicy, DefaultSavePlanner};
use dcp_testing::CountingCollective;

use crate::harness::{block_on, counting, holds_sample, memory, on_ranks, rows, sample};

#[test]
fn the_second_save_reuses_the_plan() {
    let places = [memory(), memory(), memory()];
    let runs = on_ranks(3, |rank, group| {
        let saver = Saver::with_settings(Settings::in_group(group));
        places
            .iter()
            .zip([10, 20, 30])
            .map(|(place, first)| {
                let writer = DcpWriter::new(Arc::clone(place));
                block_on(saver.save(&sample(rank, 3, first), &writer)).unwrap().reused_plan
            })
            .collect::<Vec<_>>()
    });
    assert!(runs.iter().all(|run| run == &[false, true, true]), "{runs:?}");
    for (place, first) in places.iter().zip([10, 20, 30]) {
        assert!(holds_sample(place, first));
    }
}

#[test]
fn an_overwrite_reuses_the_plan_under_new_names() {
    let place = memory();
    let runs = on_ranks(2, |rank, group| {
        let saver = Saver::with_settings(Settings::in_group(group));
        (0..4)
            .map(|step| {
                let writer = DcpWriter::new(Arc::clone(&place));
                block_on(saver.save(&sample(rank, 2, step), &writer)).unwrap().reused_plan
            })
            .collect::<Vec<_>>()
    });
    assert!(runs.iter().all(|run| run == &[false, true, true, true]), "{runs:?}");
    assert!(holds_sample(&place, 3));
    let listed = futures_util::StreamExt::collect::<Vec<_>>(place.list(None));
    let names = block_on(listed).into_iter().map(|meta| meta.unwrap().key.to_string());
    let mut data: Vec<_> = names.filter(|name| name.ends_with(".distcp")).collect();
    data.sort();
    assert_eq!(data, ["__0_0.g3.distcp", "__1_0.g3.distcp"]);
}

/// The lengths of compressed items differ between saves, the plan does not.
#[test]
fn compressed_saves_reuse_the_plan_and_return_where_items_are() {
    let places = [memory(), memory(), memory()];
    let runs = on_ranks(3, |rank, group| {
        let saver = Saver::with_settings(Settings::in_group(group));
        let save = |(place, first): (&Arc<dyn Storage>, i32)| {
            let writer = DcpWriter::builder(Arc::clone(place)).zstd(Zstd::new()).build();
            block_on(saver.save(&sample(rank, 3, first), &writer)).unwrap()
        };
        places.iter().zip([10, 20_000, 30]).map(save).collect::<Vec<_>>()
    });
    for run in &runs {
        assert_eq!([0, 1, 2].map(|save| run[save].reused_plan), [false, true, true]);
    }
    let mut ends = Vec::new();
    for ((place, first), summary) in places.iter().zip([10, 20_000, 30]).zip(&runs[0]) {
        assert!(holds_sample(place, first));
        let stored = block_on(DcpReader::new(Arc::clone(place)).metadata()).unwrap();
        let chunks = |metadata: &CheckpointMetadata| {
            let tensor = metadata.get("model.weight").unwrap().as_tensor().unwrap();
            tensor.chunks.iter().map(|chunk| chunk.placement).collect::<Vec<_>>()
        };
        assert_eq!(chunks(summary.metadata().unwrap()), chunks(&stored));
        ends.push(chunks(&stored)[2].map(|place| place.byte_offset + place.byte_len));
    }
    assert_ne!(ends[0], ends[1]);
}

#[test]
fn another_compression_is_a_change_of_plan() {
    let place = memory();
    let runs = on_ranks(2, |rank, group| {
        let saver = Saver::with_settings(Settings::in_group(group));
        [None, Some(Zstd::new()), Some(Zstd::new()), Some(Zstd::new().level(9)), None].map(|zstd| {
            let writer = DcpWriter::builder(Arc::clone(&place)).zstd(zstd).build();
            block_on(saver.save(&sample(rank, 2, 1), &writer)).unwrap().reused_plan
        })
    });
    assert!(runs.iter().all(|run| run[..4] == [false, false, true, false]), "{runs:?}");
    assert!(holds_sample(&place, 1));
}

/// Saves twice with one saver, to two places that all ranks share.
fn save_twice(
    group: Arc<dyn Collective>,
    places: &[Arc<dyn Storage>; 2],
    states: [&StateDict; 2],
) -> (SaveSummary, Option<DType>) {
    let saver = Saver::with_settings(Settings::in_group(group));
    let [_, second] = [0, 1].map(|step| {
        let writer = DcpWriter::new(Arc::clone(&places[step]));
        block_on(saver.save(states[step], &writer)).unwrap()
    });
    let entry = second.metadata().and_then(|m| m.get("t")).and_then(|e| e.as_tensor());
    let dtype = entry.map(|tensor| tensor.dtype);
    (second, dtype)
}

/// T9: PyTorch 2.15's plan cache ignores dtypes and writes metadata that contradicts the data.
#[test]
fn t09_a_change_of_dtype_is_a_change_of_plan() {
    let state = |dtype| StateDict::from([("t", Tensor::zeros(dtype, [4]).unwrap())]);
    let places = [memory(), memory()];
    let results = on_ranks(2, |_, group| {
        save_twice(group, &places, [&state(DType::Float32), &state(DType::Int32)])
    });
    assert!(results.iter().all(|(summary, _)| !summary.reused_plan));
    assert_eq!(results[0].1, Some(DType::Int32));
}

#[test]
fn one_changed_rank_is_enough_for_a_new_plan() {
    let places = [memory(), memory()];
    let results = on_ranks(3, |rank, group| {
        let mut second = sample(rank, 3, 1);
        if rank == 2 {
            second.insert("only_here", 1);
        }
        save_twice(group, &places, [&sample(rank, 3, 1), &second])
    });
    assert!(results.iter().all(|(summary, _)| !summary.reused_plan));
}

/// Ranks whose calls got out of step must not write parts of two saves into one checkpoint.
#[test]
fn ranks_at_different_saves_are_refused() {
    let place = memory();
    let results = on_ranks(2, |rank, group| {
        let saver = Saver::with_settings(Settings::in_group(Arc::clone(&group)));
        let (writer, state) = (DcpWriter::new(Arc::clone(&place)), sample(rank, 2, 1));
        block_on(saver.save(&state, &writer)).unwrap();
        // Rank 1 starts with an empty cache, as after a restart; the other rank does not.
        let saver = if rank == 1 { Saver::with_settings(Settings::in_group(group)) } else { saver };
        block_on(saver.save(&state, &writer))
    });
    for result in results {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("save number 2") && text.contains("save number 1"), "{text}");
    }
}

/// Ranks count the saves that they began, also those for which they had nothing to offer.
#[test]
fn after_a_rank_could_not_prepare_a_save_the_next_ones_go_on() {
    let place = memory();
    on_ranks(2, |rank, group| {
        let saver = Saver::with_settings(Settings::in_group(group));
        let writer = DcpWriter::new(Arc::clone(&place));
        let (good, mut bad) = (sample(rank, 2, 1), sample(rank, 2, 1));
        if rank == 1 {
            // Two values of one name.
            bad.insert("model.bias", 1);
        }
        for state in [&bad, &bad] {
            let text = block_on(saver.save(state, &writer)).unwrap_err().to_string();
            assert!(text.contains("rank 1") && text.contains("model.bias"), "{text}");
        }
        block_on(saver.save(&good, &writer)).unwrap();
    });
    assert!(holds_sample(&place, 1));
}

/// A plan is made for one division into files; another writer gets another one.
#[test]
fn another_layout_of_files_is_another_plan() {
    let places = [memory(), memory(), memory()];
    let layouts = [FileLayout::OnePerRank, FileLayout::OnePerItem, FileLayout::OnePerRank];
    let runs = on_ranks(2, |rank, group| {
        let saver = Saver::with_settings(Settings::in_group(group));
        (0..3)
            .map(|step| {
                let storage = Arc::clone(&places[step]);
                let writer = DcpWriter::builder(storage).files(layouts[step]).build();
                block_on(saver.save(&sample(rank, 2, step as i32), &writer)).unwrap().files
            })
            .collect::<Vec<_>>()
    });
    assert!(runs.iter().all(|files| files == &[2, 5, 2]), "{runs:?}");
    assert!((0..3).all(|step| holds_sample(&places[step], step as i32)));
}

#[test]
fn a_save_of_unchanged_structure_plans_in_64_bytes_for_each_rank() {
    const TENSORS: usize = 100;
    let places = [memory(), memory()];
    let state = |rank, first| {
        let tensors = (0..TENSORS).map(|n| {
            let rows = rows(&[12, 3], rank, 3);
            (format!("layers.{n}.weight"), counting(&[12, 3], &[rows], first))
        });
        tensors.collect::<StateDict>()
    };
    let calls = on_ranks(3, |rank, group| {
        let group = Arc::new(CountingCollective::new(group));
        let saver = Saver::with_settings(Settings::in_group(Arc::clone(&group) as _));
        [0, 1].map(|step| {
            let writer = DcpWriter::new(Arc::clone(&places[step]));
            let saved = block_on(saver.save(&state(rank, step as i32), &writer)).unwrap();
            assert_eq!(saved.reused_plan, step == 1);
            group.take()
        })
    });
    for [first, second] in calls {
        let names = |calls: &[(&'static str, usize)]| calls.iter().map(|c| c.0).collect::<Vec<_>>();
        let plan = ["gather", "broadcast"];
        let write = ["gather", "broadcast", "broadcast"];
        assert_eq!(names(&first), [&plan[..], &["gather", "scatter"], &write].concat());
        assert_eq!(names(&second), [&plan[..], &write].concat());
        let bytes = |calls: &[(&str, usize)]| calls.iter().map(|call| call.1).sum::<usize>();
        assert!(bytes(&second[..2]) <= 64, "{second:?}");
        // The CRC-32 and the offset of each chunk that a rank wrote, and a hundred bytes.
        assert!(bytes(&second) <= 64 + 100 + 9 * TENSORS + 100, "{second:?}");
    }
}

/// Saves with new savers, as after a restart, that remember `plans`.
fn save_after_restart(
    place: &Arc<dyn Storage>,
    plans: &[Option<Vec<u8>>],
    first: i32,
) -> Vec<(bool, Option<Vec<u8>>)> {
    on_ranks(3, |rank, group| {
        let saver = Saver::with_settings(Settings::in_group(group));
        if let Some(plans) = &plans[rank as usize] {
            saver.import_plans(plans).unwrap();
        }
        let writer = DcpWriter::new(Arc::clone(place));
        let saved = block_on(saver.save(&sample(rank, 3, first), &writer)).unwrap();
        (saved.reused_plan, saver.export_plans())
    })
}

#[test]
fn an_exported_plan_is_reused_after_a_restart() {
    assert!(Saver::new().export_plans().is_none());
    let (place, other) = (memory(), memory());
    let (reused, plans): (Vec<_>, Vec<_>) =
        save_after_restart(&place, &[None, None, None], 1).into_iter().unzip();
    assert_eq!(reused, [false; 3]);

    // Into the same place, and into another one.
    for (place, first) in [(&place, 2), (&other, 3), (&place, 4)] {
        let (reused, again): (Vec<_>, Vec<_>) =
            save_after_restart(place, &plans, first).into_iter().unzip();
        assert_eq!(reused, [true; 3]);
        assert!(holds_sample(place, first));
        assert!(again.iter().all(Option::is_some));
    }

    // A rank that lost its part makes all plan again.
    let lost = [plans[0].clone(), None, plans[2].clone()];
    let saved = save_after_restart(&place, &lost, 5);
    assert!(saved.iter().all(|(reused, _)| !reused));
    assert!(holds_sample(&place, 5));
}

#[test]
fn an_exported_plan_of_another_rank_or_planner_and_a_damaged_one_are_refused() {
    let saved = save_after_restart(&memory(), &[None, None, None], 1);
    let plans: Vec<Vec<u8>> = saved.into_iter().map(|(_, plans)| plans.unwrap()).collect();
    on_ranks(3, |rank, group| {
        let mine = &plans[rank as usize];
        let settings = Settings::in_group(group);
        let saver = Saver::with_settings(settings.clone());
        let other = saver.import_plans(&plans[(rank as usize + 1) % 3]).unwrap_err();
        assert!(other.to_string().contains("rank"), "{other}");
        let lowest = DefaultSavePlanner::new().dedup(DedupPolicy::LowestRank);
        let other = Saver::with_settings(settings.save_planner(Arc::new(lowest)));
        let other = other.import_plans(mine).unwrap_err();
        assert!(other.to_string().contains("LowestRank"), "{other}");
        for at in (0..mine.len()).step_by(7) {
            assert!(saver.import_plans(&mine[..at]).is_err());
            let mut damaged = mine.to_vec();
            damaged[at] ^= 4;
            assert!(saver.import_plans(&damaged).is_err());
        }
        assert!(saver.export_plans().is_none());
        saver.import_plans(mine).unwrap();
        assert_eq!(saver.export_plans().as_ref(), Some(mine));
    });
}
