//! Setters and jobs of the library, as the command names them.
//!
//! A message of the library names what a program calls, in backticks: `Destination::overwrite`. Whoever reads it
//! in a terminal has an option instead. So the one table below has both names, and [`of_command`] replaces the
//! one by the other wherever the command prints a message of the library. The library has no option in its
//! text (`xtask/src/terms.rs` reads its sources), and another face of it has a table of its own.

use std::borrow::Cow;

/// Texts of the library, and of the command in their place.
const TERMS: &[(&str, &str)] = &[
    ("a job without a group runs in one process", "--single runs the command in one process"),
    ("or without a group", "or with --single"),
    ("`AdapterOptions`", "`dcp merge BASE ADAPTER --adapter`"),
    ("`Architecture::Keep`", "--arch none"),
    ("`AverageOptions::non_float`", "--non-float first"),
    ("`Checkpoint::convert`", "`dcp convert`"),
    ("`Checkpoint::inspect`", "`dcp inspect`"),
    ("`Checkpoint::verify`", "`dcp verify`"),
    ("`Conversion::dequantize`", "--dequantize"),
    ("`Copying::compare`", "--lengths"),
    ("`DequantizeOptions::block`", "--block-size"),
    ("`Destination::compression`", "--compress"),
    ("`Destination::config`", "--config"),
    ("`Destination::device`", "--device"),
    ("`Destination::dtype`", "--dtype"),
    ("`Destination::legacy`", "--legacy"),
    ("`Destination::max_shard_bytes`", "--max-shard-size"),
    ("`Destination::overwrite`", "--overwrite"),
    ("`Destination::ranks`", "--ranks"),
    ("`Destination::to`", "--to"),
    ("`DiffOptions::keys_only`", "`dcp diff A B --keys-only`"),
    ("`JobOptions::callables`", "--allow-callable"),
    ("`JobOptions::max_memory`", "--max-memory"),
    ("`JobOptions::parallelism`", "the number of reads at once"),
    ("`KeepBest`", "`dcp prune --help`"),
    ("`Keys::exclude`", "--exclude"),
    ("`Keys::include`", "--include"),
    ("`Keys::map`", "--map"),
    ("`Keys::rename`", "--rename"),
    ("`Mapping::declaration`", "`dcp arch FAMILY > my.toml`"),
    ("`Mapping::families`", "`dcp arch`"),
    ("`MappingOptions::allow_left_over`", "--allow-left-over"),
    ("`MappingOptions::arch`", "--arch"),
    ("`MappingOptions::ignore_args`", "--ignore-args"),
    ("`MappingOptions::layers`", "--transformer-impl"),
    ("`MappingOptions::untie`", "--untie"),
    ("`MappingOptions::vocab_divisor`", "--make-vocab-divisible-by"),
    ("`MegatronTarget::ep`", "--ep"),
    ("`MegatronTarget::etp`", "--etp"),
    ("`MegatronTarget::form`", "--form"),
    ("`MegatronTarget::integrity`", "--integrity"),
    ("`MegatronTarget::pp`", "--pp"),
    ("`MegatronTarget::tp`", "--tp"),
    ("`Merge::duplicates`", "--identical"),
    ("`Opener::list`", "`dcp ls`"),
    ("`Opener::rank`", "--rank"),
    ("`Opener::variant`", "--variant"),
    ("`OptimizerForm::PerParameter`", "--optimizer per-parameter"),
    ("`OptimizerLayout`", "--optimizer-layout"),
    ("`OptimizerOptions::allow_corrupt`", "--allow-corrupt-optimizer"),
    ("`OptimizerOptions::form`", "--optimizer"),
    ("`OptimizerOptions::repair`", "--repair-optimizer"),
    (
        "`PipelineSplit::account_for_embedding_in_pipeline_split`",
        "--account-for-embedding-in-pipeline-split",
    ),
    ("`PipelineSplit::account_for_loss_in_pipeline_split`", "--account-for-loss-in-pipeline-split"),
    ("`PipelineSplit::decoder_first_pipeline_num_layers`", "--decoder-first-pipeline-num-layers"),
    ("`PipelineSplit::decoder_last_pipeline_num_layers`", "--decoder-last-pipeline-num-layers"),
    ("`PipelineSplit::virtual_pipeline_model_parallel_size`", "--vpp"),
    ("`StatePart::Everything`", "--everything"),
    ("`StatePart::Model`", "--model-only"),
    ("`StatePart::WithoutOptimizer`", "--no-optimizer"),
    ("`StepOrder::Step`", "--by step"),
    ("`StepOrder::Time`", "--by time"),
    ("`Verification::deep`", "`dcp verify --deep`"),
    ("`exclude`", "--exclude"),
    ("`filter`", "--filter"),
    ("`follow_links`", "--follow-links"),
    ("`framework::arguments`", "`dcp inspect --args`"),
    ("`framework::common_state`", "`dcp inspect --common`"),
    ("`include`", "--include"),
    ("`keep-dtype`", "--keep-dtype"),
    ("`map`", "--map"),
    ("`merge`", "`dcp merge`"),
    ("`rename`", "--rename"),
    ("`strip-a`", "--strip-a"),
    ("`strip-b`", "--strip-b"),
];

/// A message of the library with the options and subcommands of the command.
pub fn of_command(message: &str) -> Cow<'_, str> {
    // Nearly all of the texts have a backtick.
    let mut text = Cow::Borrowed(message);
    for (library, command) in TERMS {
        if text.contains(library) {
            text = Cow::Owned(text.replace(library, command));
        }
    }
    text
}

/// Names options in messages of a report.
pub(crate) fn in_messages<'a>(messages: impl IntoIterator<Item = &'a mut String>) {
    for message in messages {
        if let Cow::Owned(text) = of_command(message) {
            *message = text;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn a_message_of_the_library_names_options() {
        let message = "pass `Destination::overwrite`, or say `Destination::to` hf";
        assert_eq!(of_command(message), "pass --overwrite, or say --to hf");
        assert!(matches!(of_command("there is nothing at \"run\""), Cow::Borrowed(_)));
    }

    #[test]
    fn the_command_has_every_option_and_subcommand_of_the_table() {
        let cli = Cli::command();
        let mut options = BTreeSet::new();
        for command in cli.get_subcommands().chain([&cli]) {
            options.extend(command.get_arguments().filter_map(|arg| arg.get_long()));
        }
        let commands: BTreeSet<&str> = cli.get_subcommands().map(|one| one.get_name()).collect();
        for (library, command) in TERMS {
            for word in command.split([' ', '`']) {
                if let Some(option) = word.strip_prefix("--") {
                    assert!(options.contains(option) || option == "help", "{library}: {option}");
                }
            }
            if let Some(name) = command.strip_prefix("`dcp ") {
                let name = name.split([' ', '`']).next().unwrap();
                assert!(commands.contains(name), "{library}: {name}");
            }
        }
    }
}
