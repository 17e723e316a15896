//! Checks tensor-parallel sizes against the attention heads of a model.

use crate::args::MegatronArgs;
use crate::error::MegatronError;
use crate::layout::ParallelLayout;

/// Refuses a layout that no version of Megatron-Core builds the model of `args` in: heads that
/// tensor-parallel ranks cannot share equally, and query groups that are neither a multiple nor a
/// divisor of these ranks (`TransformerConfig.__post_init__` of 0.16 and later).
pub(super) fn check_heads(
    layout: ParallelLayout,
    args: Option<&MegatronArgs>,
) -> Result<(), MegatronError> {
    let Some((heads, groups)) = args.and_then(heads_and_groups) else { return Ok(()) };
    let tp = u64::from(layout.tp);
    if tp == 0 {
        return Ok(());
    }
    let problem = if heads % tp != 0 {
        format!("{heads} attention heads cannot be divided among {tp} tensor-parallel ranks")
    } else if groups % tp != 0 && tp % groups != 0 {
        format!(
            "{groups} query groups are neither a multiple nor a divisor of {tp} tensor-parallel \
             ranks"
        )
    } else {
        return Ok(());
    };
    Err(MegatronError::Layout { layout, problem })
}

/// The oldest Megatron-Core that builds the model of `args` in this layout, where that is newer than
/// 0.6: until 0.15 every tensor-parallel rank needs a query group of its own.
pub(crate) fn oldest_version(
    layout: ParallelLayout,
    args: Option<&MegatronArgs>,
) -> Option<&'static str> {
    let (_, groups) = args.and_then(heads_and_groups)?;
    (u64::from(layout.tp) > groups).then_some("0.16")
}

/// Attention heads, and groups of them that share keys and values.
fn heads_and_groups(args: &MegatronArgs) -> Option<(u64, u64)> {
    let heads = args.num_attention_heads().filter(|heads| *heads > 0)?;
    let grouped = args.group_query_attention() != Some(false);
    let groups = args.num_query_groups().filter(|groups| grouped && *groups > 0);
    Some((heads, groups.unwrap_or(heads)))
}

#[cfg(test)]
mod tests {
    use dcp_core::Value;
    use dcp_core::value::Dict;

    use super::*;

    fn args(heads: i64, groups: i64, grouped: bool) -> MegatronArgs {
        let args = Dict::from([
            ("num_attention_heads", Value::Int(heads)),
            ("num_query_groups", Value::Int(groups)),
            ("group_query_attention", Value::Bool(grouped)),
        ]);
        MegatronArgs::from_value(&Value::Dict(args)).unwrap()
    }

    #[test]
    fn query_groups_limit_the_tensor_parallel_ranks() {
        let check = |args: &MegatronArgs, tp| {
            let layout = ParallelLayout::new(tp, 1);
            let problem = check_heads(layout, Some(args)).err().map(|error| error.to_string());
            (problem, oldest_version(layout, Some(args)))
        };
        let eight_in_two = args(8, 2, true);
        for tp in [1, 2] {
            assert_eq!(check(&eight_in_two, tp), (None, None), "{tp}");
        }
        for tp in [4, 8] {
            assert_eq!(check(&eight_in_two, tp), (None, Some("0.16")), "{tp}");
        }
        for (args, tp, says) in [
            (args(8, 2, true), 16, "8 attention heads"),
            (args(8, 2, true), 3, "8 attention heads"),
            (args(12, 4, true), 6, "4 query groups"),
            // Without group_query_attention the number of groups means nothing.
            (args(12, 1, false), 5, "12 attention heads"),
        ] {
            let (problem, _) = check(&args, tp);
            assert!(problem.as_ref().is_some_and(|p| p.contains(says)), "{tp}: {problem:?}");
        }
        assert_eq!(check(&args(12, 1, false), 12), (None, None));
        assert!(check_heads(ParallelLayout::new(7, 1), None).is_ok());
    }
}
