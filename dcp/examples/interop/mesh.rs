//! The shards of every rank, compared with those that DTensor computes.

use dcp::Region;
use dcp::core::PlanError;
use dcp::planner::mesh::{DeviceMesh, MeshLayout, TensorPlacement, recorded_box};

use crate::Result;
use dcp_core::error::StateProblem;

/// Compares each case of a file of `interop_mesh.py`.
pub(crate) fn run(file: &str) -> Result {
    let text = std::fs::read_to_string(file)?;
    for line in text.lines() {
        check(line).map_err(|error| format!("{line}: {error}"))?;
    }
    if text.is_empty() { Err("no cases".into()) } else { Ok(()) }
}

fn check(line: &str) -> Result {
    let (case, expected) = line.split_once(" = ").ok_or("no result")?;
    let [kind, shape, mesh, placements] = *case.split(' ').collect::<Vec<_>>() else {
        return Err("no case".into());
    };
    let (shape, mesh) = (numbers(shape)?, DeviceMesh::new(numbers(mesh)?)?);
    let placements = placements.split(';').map(placement).collect::<Result<Vec<_>>>()?;
    let layout = MeshLayout::new(mesh.clone(), placements.clone());
    if kind == "partial" {
        let refused = layout.regions("w", &shape, 0);
        let is_refused = matches!(refused, Err(PlanError::State { fqn, problem: StateProblem::PartialSum }) if fqn == "w");
        return if is_refused == (expected == "error") { Ok(()) } else { Err("other".into()) };
    }
    let ranks: Vec<&str> = expected.split(" | ").collect();
    if ranks.len() != mesh.world_size() as usize {
        return Err("another number of ranks".into());
    }
    for (rank, expected) in (0..).zip(ranks) {
        let ours = match kind {
            "box" => {
                let coordinate = mesh.coordinate(rank).ok_or("a rank outside the mesh")?;
                let ours = recorded_box(&shape, &mesh, &coordinate, &placements)?;
                format!("{} {}", text(ours.offsets()), text(ours.sizes()))
            }
            "data" => {
                let mut elements = Vec::new();
                for region in layout.regions("w", &shape, rank)? {
                    elements.extend(numbered(&region, &shape));
                }
                text(&elements)
            }
            other => return Err(format!("unknown kind {other}").into()),
        };
        if ours != expected {
            return Err(format!("rank {rank} has {ours}").into());
        }
    }
    Ok(())
}

/// The elements of a region by their row-major number in the tensor.
fn numbered(region: &Region, shape: &[u64]) -> Vec<u64> {
    region.runs_in(shape).flat_map(|(start, len)| start..start + len).collect()
}

fn placement(code: &str) -> Result<TensorPlacement> {
    let (kind, rest) = code.split_at(1);
    Ok(match kind {
        "R" => TensorPlacement::Replicate,
        "P" => TensorPlacement::Partial,
        "S" => TensorPlacement::Shard(rest.parse()?),
        "T" => {
            let (axis, factor) = rest.split_once('/').ok_or("no split factor")?;
            let (axis, split_factor) = (axis.parse()?, factor.parse()?);
            TensorPlacement::StridedShard { axis, split_factor }
        }
        other => return Err(format!("unknown placement {other}").into()),
    })
}

fn numbers(text: &str) -> Result<Vec<u64>> {
    if text == "-" {
        return Ok(Vec::new());
    }
    text.split(',').map(|number| Ok(number.parse()?)).collect()
}

fn text(numbers: &[u64]) -> String {
    if numbers.is_empty() {
        return "-".to_owned();
    }
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(",")
}
