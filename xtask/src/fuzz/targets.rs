//! The fuzz targets: from which seeds each starts, and which parsers it reaches.

use xtask_host::Result;

/// One program of `fuzz/fuzz_targets`.
pub(super) struct Target {
    pub(super) name: &'static str,
    /// Folders of seeds that ordinary tests replay.
    pub(super) seeds: &'static [&'static str],
    /// Whose parsers it calls: crate and file, wherever in the crate that is.
    #[cfg_attr(not(test), expect(dead_code, reason = "a test compares them with the sources"))]
    pub(super) parsers: &'static [&'static str],
}

pub(super) const TARGETS: &[Target] = &[
    Target {
        name: "aws_profile",
        seeds: &["dcp-storage-object/tests/corpus/aws_profile"],
        parsers: &["dcp-storage-object/ini.rs"],
    },
    Target {
        name: "cached_distribution",
        seeds: &["dcp-megatron/tests/corpus/cached_distribution"],
        parsers: &["dcp-megatron/cache.rs"],
    },
    Target { name: "folder", seeds: &["dcp-formats/tests/corpus/folder"], parsers: &[] },
    Target {
        name: "handshake",
        seeds: &["dcp-collectives/tests/corpus/handshake"],
        parsers: &["dcp-collectives/frame.rs"],
    },
    Target {
        name: "hf_index",
        seeds: &["dcp-formats/tests/corpus/hf_index"],
        parsers: &["dcp-formats/index_file.rs", "dcp-formats/sharding.rs"],
    },
    Target {
        name: "mapping",
        seeds: &["dcp-mapping/families"],
        parsers: &[
            "dcp-mapping/parser.rs",
            "dcp-mapping/layout.rs",
            "dcp-mapping/template.rs",
            "dcp-mapping/yaml.rs",
        ],
    },
    Target {
        name: "megatron_commit",
        seeds: &["dcp-megatron/tests/corpus/commit"],
        parsers: &["dcp-megatron/recovery.rs"],
    },
    Target { name: "megatron_common", seeds: &["dcp-formats/tests/corpus/pickle"], parsers: &[] },
    Target {
        name: "megatron_files",
        seeds: &["dcp-megatron/tests/corpus/small_files"],
        parsers: &["dcp-megatron/config.rs", "dcp-megatron/manifest.rs", "dcp-megatron/tracker.rs"],
    },
    Target {
        name: "metadata",
        seeds: &["dcp-formats/tests/corpus/metadata"],
        parsers: &["dcp-formats/decode.rs"],
    },
    Target {
        name: "object_blob",
        seeds: &["dcp-formats/tests/corpus/object_blob"],
        parsers: &["dcp-formats/torch_object.rs"],
    },
    Target {
        name: "olmo_note",
        seeds: &["dcp-olmo/tests/corpus/note"],
        parsers: &["dcp-olmo/format.rs"],
    },
    Target {
        name: "pickle",
        seeds: &["dcp-formats/tests/corpus/pickle"],
        parsers: &["dcp-formats/machine.rs"],
    },
    Target {
        name: "pickle_rewrite",
        seeds: &["dcp-formats/tests/corpus/pickle", "dcp-formats/tests/corpus/pickle_rewrite"],
        parsers: &[],
    },
    Target {
        name: "plan_wire",
        seeds: &["dcp-formats/tests/corpus/plan_wire"],
        parsers: &[
            "dcp-core/plan_keys.rs",
            "dcp-core/plan_outline.rs",
            "dcp-core/load_plan.rs",
            "dcp-core/metadata.rs",
            "dcp-core/plan.rs",
            "dcp-core/value.rs",
            "dcp-core/write_plan.rs",
        ],
    },
    Target {
        name: "safetensors",
        seeds: &["dcp-formats/tests/corpus/safetensors"],
        parsers: &["dcp-formats/header.rs"],
    },
    Target { name: "shards", seeds: &[], parsers: &["dcp-megatron/rank_shards.rs"] },
    Target {
        name: "sidecar",
        seeds: &["dcp-formats/tests/corpus/sidecar"],
        parsers: &["dcp-formats/sidecar.rs"],
    },
    Target {
        name: "tensor_blob",
        seeds: &["dcp-formats/tests/corpus/tensor_blob"],
        parsers: &["dcp-formats/blob.rs", "dcp-formats/read.rs"],
    },
    Target {
        name: "torch_save",
        seeds: &["dcp-formats/tests/corpus/torch_save"],
        parsers: &["dcp-formats/file.rs", "dcp-formats/legacy.rs"],
    },
    Target {
        name: "torch_zip",
        seeds: &["dcp-formats/tests/corpus/torch_zip"],
        parsers: &["dcp-formats/directory.rs", "dcp-formats/record.rs"],
    },
    Target {
        name: "trace",
        seeds: &["dcp-trace/tests/corpus/trace"],
        parsers: &["dcp-trace/file.rs"],
    },
    Target {
        name: "zarr",
        seeds: &["dcp-formats/tests/corpus/zarr"],
        parsers: &["dcp-formats/header.rs"],
    },
];

/// The folders of seeds of a target.
pub(super) fn seeds(target: &str) -> Result<&'static [&'static str]> {
    let found = TARGETS.iter().find(|known| known.name == target);
    Ok(found.ok_or_else(|| format!("there is no fuzz target {target:?}"))?.seeds)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::TARGETS;
    use crate::tidy::{lines_before_tests, rust_sources};
    use xtask_host::workspace;

    /// Whose parsers are fuzzed.
    const PARSING: &[&str] = &[
        "dcp-collectives/src/mesh/",
        "dcp-collectives/src/tcp/",
        "dcp-core/src/protocol/wire/",
        "dcp-formats/src/",
        "dcp-mapping/src/",
        "dcp-megatron/src/",
        "dcp-olmo/src/",
        "dcp-storage-object/src/",
        "dcp-trace/src/",
    ];

    /// Files with a function of a parser's form that no target needs to reach by itself. A file
    /// leaves this list; none is added without its reason.
    const NOT_FUZZED: &[(&str, &str)] = &[
        ("dcp-formats/index.rs", "hands a .metadata on to metadata/decode.rs"),
        ("dcp-formats/value.rs", "hands a blob on to torch_object.rs"),
        ("dcp-formats/partial.rs", "runs any parser"),
        ("dcp-megatron/inventory.rs", "ranks of one save send it to each other"),
        ("dcp-megatron/record_replay.rs", "ranks of one load send it to each other"),
        ("dcp-olmo/written.rs", "ranks of one export send it to each other"),
    ];

    /// Whether a source has a function that takes bytes and is named like a parser, or one called
    /// `parse` that takes text.
    fn has_parser(source: &str) -> bool {
        const NAMES: [&str; 6] =
            ["parse", "decode", "from_wire", "from_tail", "from_head", "from_pickle"];
        const BYTES: [&str; 4] = ["[u8]", "Bytes", "Sparse", "(text: &str"];
        let code: Vec<&str> = lines_before_tests(source).map(str::trim).collect();
        let code = code.join(" ");
        code.split(" fn ").skip(1).any(|function| {
            let signature = function.split(['{', ';']).next().unwrap_or_default();
            let arguments = signature.split("->").next().unwrap_or_default();
            NAMES.iter().any(|name| function.starts_with(name))
                && BYTES.iter().any(|kind| arguments.contains(kind))
        })
    }

    #[test]
    fn parsers_are_known_by_their_form() {
        assert!(has_parser("pub fn parse(\n    json: &[u8],\n) -> Result<Self> {"));
        assert!(has_parser("impl A { fn decode_all(bytes: &Bytes) -> u8; }"));
        assert!(!has_parser("fn decoded(layout: u8) { parse(b as &[u8]) }"));
        assert!(!has_parser("fn a() {}\n#[cfg(test)]\nmod tests {\nfn parse(a: &[u8]) {} }"));
    }

    #[test]
    fn every_parser_is_fuzzed() {
        let found: BTreeSet<String> = rust_sources()
            .into_iter()
            .map(|(file, source)| (file.display().to_string(), source))
            .filter(|(file, _)| PARSING.iter().any(|crate_| file.starts_with(crate_)))
            .filter(|(file, source)| !file.ends_with("/tests.rs") && has_parser(source))
            .filter_map(|(file, _)| {
                Some(format!("{}/{}", file.split_once('/')?.0, file.rsplit_once('/')?.1))
            })
            .collect();
        let fuzzed = TARGETS.iter().flat_map(|target| target.parsers).copied();
        let known: BTreeSet<String> =
            fuzzed.chain(NOT_FUZZED.iter().map(|(file, _)| *file)).map(str::to_owned).collect();
        let new: Vec<_> = found.difference(&known).collect();
        let gone: Vec<_> = known.difference(&found).collect();
        assert!(
            new.is_empty() && gone.is_empty(),
            "parsers without a fuzz target: {new:#?}\nparsers that are not there: {gone:#?}"
        );
    }

    #[test]
    fn the_list_has_every_target_and_seeds_that_are_there() {
        let files = workspace::files().unwrap();
        let manifest = std::fs::read_to_string(workspace::root().join("fuzz/Cargo.toml")).unwrap();
        let programs: BTreeSet<&str> = files
            .iter()
            .filter(|file| file.starts_with("fuzz/fuzz_targets"))
            .map(|file| file.file_stem().unwrap().to_str().unwrap())
            .collect();
        let listed: BTreeSet<&str> = TARGETS.iter().map(|target| target.name).collect();
        assert_eq!(programs, listed);
        for target in TARGETS {
            assert!(manifest.contains(&format!("\nname = \"{}\"\n", target.name)));
            let archive = format!("fuzz/seeds/{}.tar.gz", target.name);
            let mut seeds = target.seeds.to_vec();
            seeds.push(&archive);
            assert!(
                seeds.iter().any(|seeds| files.iter().any(|file| file.starts_with(seeds))),
                "{} starts from nothing",
                target.name
            );
            for folder in target.seeds {
                assert!(workspace::root().join(folder).is_dir(), "{folder} is not there");
            }
        }
    }
}
