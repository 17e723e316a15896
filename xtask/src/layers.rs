//! Who may depend on whom: the table of ARCHITECTURE.md as data, held against what cargo and the
//! sources say.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use xtask_host::workspace::{self, list, text};

/// One crate and its place.
struct Layer {
    /// The package.
    package: &'static str,
    /// Our crates that it may be built from.
    uses: &'static [&'static str],
    /// Our crates that its tests and examples may use beyond those.
    tests_use: &'static [&'static str],
    /// Foreign crates that must not be reachable from it, however indirectly.
    never: &'static [&'static str],
    /// What its sources must not name, outside tests.
    never_named: &'static [&'static str],
}

const RUNTIMES: &[&str] =
    &["tokio", "async-std", "smol", "rayon", "object_store", "reqwest", "hyper", "zip"];
const NO_IO: &[&str] =
    &["std::fs", "std::net", "std::process", "std::thread", "tokio::", "std::io::stdin"];

const LAYERS: &[Layer] = &[
    Layer {
        package: "dcp-core",
        uses: &[],
        tests_use: &["dcp-conformance", "dcp-planner"],
        never: &["tokio", "object_store", "reqwest", "zip", "serde_json", "half", "url", "tracing"],
        never_named: NO_IO,
    },
    Layer {
        package: "dcp-cast",
        uses: &["dcp-core"],
        tests_use: &[],
        never: RUNTIMES,
        never_named: &[
            "std::fs",
            "std::net",
            "std::process",
            "std::thread",
            "async fn",
            "SavePlan",
        ],
    },
    Layer {
        package: "dcp-planner",
        uses: &["dcp-core"],
        tests_use: &["dcp-conformance"],
        never: RUNTIMES,
        never_named: &[
            "std::fs",
            "std::net",
            "std::process",
            "std::thread",
            "async fn",
            "async move",
            "Instant",
            "SystemTime",
            "RandomState",
        ],
    },
    Layer {
        package: "dcp-formats",
        uses: &["dcp-core"],
        tests_use: &["dcp-conformance", "dcp-testing", "dcp-storage-fs", "dcp-planner"],
        never: RUNTIMES,
        never_named: NO_IO,
    },
    Layer {
        package: "dcp-storage-fs",
        uses: &["dcp-core"],
        tests_use: &["dcp-conformance", "dcp-testing"],
        never: &["object_store", "reqwest", "hyper", "zip", "serde_json", "ciborium"],
        never_named: &["Tensor", "SavePlan", "LoadPlan", "std::net"],
    },
    Layer {
        package: "dcp-storage-object",
        uses: &["dcp-core"],
        tests_use: &[
            "dcp-conformance",
            "dcp-testing",
            "dcp-formats",
            "dcp-engine",
            "dcp-collectives",
        ],
        never: &["aws-lc-rs", "aws-lc-sys", "openssl-sys", "native-tls", "zip", "ciborium"],
        never_named: &["Tensor", "SavePlan", "LoadPlan", "std::fs", "std::net"],
    },
    Layer {
        package: "dcp-storage-cache",
        uses: &["dcp-core"],
        tests_use: &["dcp-conformance", "dcp-testing"],
        never: &["object_store", "reqwest", "hyper", "zip", "serde_json", "ciborium"],
        never_named: &["Tensor", "SavePlan", "LoadPlan", "std::net"],
    },
    Layer {
        package: "dcp-collectives",
        uses: &["dcp-core"],
        tests_use: &["dcp-conformance", "dcp-testing"],
        never: &["tokio", "object_store", "reqwest", "zip"],
        never_named: &["std::fs", "tokio::", "StorageWriter", "StorageReader", "SavePlan"],
    },
    Layer {
        package: "dcp-engine",
        uses: &["dcp-core", "dcp-cast", "dcp-planner"],
        tests_use: &[
            "dcp-conformance",
            "dcp-testing",
            "dcp-formats",
            "dcp-storage-fs",
            "dcp-collectives",
        ],
        never: &["object_store", "reqwest", "hyper", "zip", "serde_json", "crc32fast"],
        never_named: &["std::fs", "std::net", "std::process::Command"],
    },
    Layer {
        package: "dcp-cuda",
        uses: &["dcp-core"],
        tests_use: &["dcp-testing", "dcp-engine", "dcp-formats", "dcp-storage-fs"],
        never: &["object_store", "reqwest", "hyper", "zip", "serde_json"],
        never_named: &["StorageWriter", "StorageReader", "SavePlan", "LoadPlan", "std::fs"],
    },
    Layer {
        package: "dcp-collectives-nccl",
        uses: &["dcp-core", "dcp-cuda"],
        tests_use: &[
            "dcp-conformance",
            "dcp-testing",
            "dcp-collectives",
            "dcp-engine",
            "dcp-formats",
        ],
        never: &["object_store", "reqwest", "hyper", "zip", "serde_json"],
        never_named: &["std::fs", "std::net", "StorageWriter", "StorageReader", "SavePlan"],
    },
    Layer {
        package: "dcp-trace",
        uses: &["dcp-core", "dcp-engine"],
        tests_use: &["dcp-conformance", "dcp-testing", "dcp-formats"],
        never: &["object_store", "reqwest", "hyper", "zip", "opentelemetry"],
        never_named: &["StorageReader", "StorageWriter", "SavePlan", "LoadPlan", "std::net"],
    },
    Layer {
        package: "dcp-olmo",
        uses: &["dcp-core", "dcp-planner", "dcp-formats", "dcp-engine", "dcp-jobs"],
        tests_use: &["dcp-conformance", "dcp-testing", "dcp-storage-fs", "dcp-collectives"],
        never: &["object_store", "reqwest", "hyper", "zip"],
        never_named: &["std::fs", "std::net", "std::process::Command"],
    },
    Layer {
        package: "dcp-peft",
        uses: &["dcp-core", "dcp-formats", "dcp-jobs"],
        tests_use: &["dcp-testing", "dcp-storage-fs"],
        never: &["object_store", "reqwest", "hyper", "zip"],
        never_named: &["std::fs", "std::net", "std::process::Command"],
    },
    Layer {
        package: "dcp-deepspeed",
        uses: &["dcp-core", "dcp-formats", "dcp-jobs"],
        tests_use: &["dcp-testing", "dcp-storage-fs"],
        never: &["object_store", "reqwest", "hyper", "zip"],
        never_named: &["std::fs", "std::net", "std::process::Command"],
    },
    Layer {
        package: "dcp-trainers",
        uses: &["dcp-core", "dcp-formats", "dcp-jobs"],
        tests_use: &["dcp-testing", "dcp-storage-fs"],
        never: &["object_store", "reqwest", "hyper", "zip"],
        never_named: &["std::fs", "std::net", "std::process::Command"],
    },
    Layer {
        package: "dcp-state",
        uses: &["dcp-core", "dcp-planner", "dcp-engine"],
        tests_use: &["dcp-testing"],
        never: &["object_store", "reqwest", "hyper", "zip"],
        never_named: &["std::fs", "std::net", "std::process", "std::thread", "tokio::"],
    },
    Layer {
        package: "dcp-mapping",
        uses: &["dcp-core", "dcp-planner", "dcp-formats", "dcp-jobs"],
        tests_use: &["dcp-conformance", "dcp-testing", "dcp-storage-fs"],
        never: &["object_store", "reqwest", "hyper", "zip"],
        never_named: &["std::fs", "std::net", "std::process::Command"],
    },
    Layer {
        package: "dcp-megatron",
        uses: &["dcp-core", "dcp-planner", "dcp-formats", "dcp-engine", "dcp-jobs"],
        tests_use: &["dcp-conformance", "dcp-testing", "dcp-storage-fs", "dcp-collectives"],
        never: &["object_store", "reqwest", "hyper", "zip"],
        never_named: &["std::fs", "std::net", "std::process::Command"],
    },
    Layer {
        package: "dcp-jobs",
        uses: &["dcp-core", "dcp-cast", "dcp-planner", "dcp-engine", "dcp-formats"],
        tests_use: &["dcp-conformance", "dcp-testing", "dcp-storage-fs"],
        never: &["object_store", "reqwest", "hyper", "zip", "clap", "indicatif", "comfy-table"],
        never_named: &[
            "std::net",
            "std::process::Command",
            "std::io::std",
            "OnceLock",
            "LazyLock",
            "Megatron",
            "megatron",
            "torch-dist",
            "torch_dist",
            "Olmo",
            "olmo",
            "Peft",
            "peft",
            "DeepSpeed",
            "deepspeed",
            "RankFiles",
            "trainers",
        ],
    },
    Layer {
        package: "distcp",
        uses: &[
            "dcp-core",
            "dcp-planner",
            "dcp-formats",
            "dcp-storage-fs",
            "dcp-storage-object",
            "dcp-storage-cache",
            "dcp-trace",
            "dcp-collectives",
            "dcp-engine",
            "dcp-olmo",
            "dcp-peft",
            "dcp-deepspeed",
            "dcp-trainers",
            "dcp-mapping",
            "dcp-megatron",
            "dcp-state",
            "dcp-jobs",
        ],
        tests_use: &["dcp-conformance", "dcp-testing"],
        never: &["aws-lc-rs", "aws-lc-sys", "openssl-sys", "native-tls", "zip"],
        never_named: &[],
    },
    Layer {
        package: "dcp-cli",
        uses: &["distcp"],
        tests_use: &["dcp-conformance", "dcp-testing", "dcp-storage-fs"],
        never: &["zip"],
        never_named: &[],
    },
    Layer {
        package: "dcp-conformance",
        uses: &["dcp-core"],
        tests_use: &["dcp-formats", "dcp-planner"],
        never: &["object_store", "reqwest", "zip"],
        never_named: &["std::process::Command"],
    },
    Layer {
        package: "dcp-testing",
        uses: &["dcp-core", "dcp-conformance", "dcp-collectives", "dcp-storage-fs"],
        tests_use: &[],
        never: &["object_store", "reqwest", "zip"],
        never_named: &["std::process::Command"],
    },
    Layer {
        package: "xtask",
        uses: &["xtask-host", "xtask-bench", "xtask-interop"],
        tests_use: &[],
        never: RUNTIMES,
        never_named: &[],
    },
    Layer {
        package: "xtask-bench",
        uses: &["xtask-host"],
        tests_use: &[],
        never: RUNTIMES,
        never_named: &[],
    },
    Layer {
        package: "xtask-interop",
        uses: &["xtask-host"],
        tests_use: &[],
        never: RUNTIMES,
        never_named: &[],
    },
    Layer { package: "xtask-host", uses: &[], tests_use: &[], never: RUNTIMES, never_named: &[] },
];

/// The longest chain of arrows between our crates.
const LONGEST_CHAIN: usize = 6;

fn layer(package: &str) -> Option<&'static Layer> {
    LAYERS.iter().find(|layer| layer.package == package)
}

#[test]
fn every_crate_has_a_layer() {
    let packages: BTreeSet<String> =
        workspace::packages().unwrap().into_iter().map(|package| package.name).collect();
    let layers: BTreeSet<String> = LAYERS.iter().map(|layer| layer.package.to_owned()).collect();
    assert_eq!(packages, layers, "the crates of Cargo.toml and those of xtask/src/layers.rs");
}

#[test]
fn no_arrow_that_is_not_in_the_table() {
    let metadata = workspace::resolved().unwrap();
    let packages = list(&metadata, "packages");
    let ours: BTreeSet<&str> = members(&metadata).into_values().collect();
    let mut wrong = Vec::new();
    for package in packages.iter().filter(|package| ours.contains(text(package, "name"))) {
        let name = text(package, "name");
        let Some(layer) = layer(name) else { continue };
        for dependency in list(package, "dependencies") {
            let to = text(dependency, "name");
            let for_tests = text(dependency, "kind") == "dev";
            let allowed = layer.uses.contains(&to)
                || for_tests && (layer.tests_use.contains(&to) || to == name);
            if ours.contains(to) && !allowed {
                let how = if for_tests { "in tests, on" } else { "on" };
                wrong.push(format!("{name} depends {how} {to}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Another crate could not be packed with it, nor built.
#[test]
fn what_is_published_needs_nothing_that_is_not() {
    let packages = workspace::packages().unwrap();
    let published = |name: &str| packages.iter().any(|p| p.name == name && p.is_published);
    for layer in LAYERS.iter().filter(|layer| published(layer.package)) {
        for used in layer.uses {
            assert!(published(used), "{} uses {used}, which is not published", layer.package);
        }
    }
}

#[test]
fn nothing_foreign_where_it_must_not_be() {
    let metadata = workspace::resolved().unwrap();
    let graph = Graph::of(&metadata);
    let mut wrong = Vec::new();
    for (id, name) in members(&metadata) {
        let Some(layer) = layer(name) else { continue };
        let reached = graph.reachable(id);
        for never in layer.never {
            if let Some(path) = reached.get(never) {
                wrong.push(format!("{name} reaches {never} through {}", path.join(" → ")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn chains_of_our_crates_stay_short() {
    fn depth(package: &str) -> usize {
        let below = layer(package).map_or(&[][..], |layer| layer.uses);
        below.iter().map(|below| 1 + depth(below)).max().unwrap_or(0)
    }
    for layer in LAYERS {
        assert!(depth(layer.package) <= LONGEST_CHAIN, "{}", layer.package);
    }
}

#[test]
fn sources_do_not_name_what_belongs_elsewhere() {
    /// Files that may, with the reason.
    const EXCEPT: [(&str, &str); 3] = [
        ("dcp-storage-object/src/opener/aws_profile.rs", "keys of a user are in two files"),
        (
            "dcp-engine/src/read_sharing/machines.rs",
            "the system shows the name of a boot as a file",
        ),
        ("dcp-collectives/src/tcp/file.rs", "the secret of a job and its certificates are files"),
    ];
    let mut wrong =
        named_in_sources(|package| layer(package).map_or(&[], |layer| layer.never_named));
    wrong.retain(|found| !EXCEPT.iter().any(|(file, _)| found.starts_with(file)));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What a folder holds is known to the format that opens it, and to no crate below that one.
#[test]
fn file_names_of_frameworks_stay_in_their_crates() {
    const BELOW: [&str; 9] = [
        "dcp-jobs",
        "dcp-core",
        "dcp-planner",
        "dcp-formats",
        "dcp-engine",
        "dcp-storage-fs",
        "dcp-storage-cache",
        "dcp-storage-object",
        "dcp-collectives",
    ];
    const NAMES: [&str; 8] = [
        "\"metadata.json\"",
        "\"common.pt\"",
        "\"integrity.json\"",
        "\"mp_rank_",
        "\"iter_",
        "latest_checkpointed_iteration",
        "model_and_optim",
        "\".metadata.json\"",
    ];
    let mut wrong = named_in_sources(|package| if BELOW.contains(&package) { &NAMES } else { &[] });
    // Names of steps are those of every trainer, in one table.
    wrong.retain(|found| !found.starts_with("dcp-jobs/src/checkpoint/step_naming.rs"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Where the code of a crate, tests aside, has one of the texts that it must not have.
fn named_in_sources(never: impl Fn(&str) -> &'static [&'static str]) -> Vec<String> {
    let mut wrong = Vec::new();
    for package in workspace::packages().unwrap() {
        let never = never(&package.name);
        let sources = package.dir.join("src");
        for file in workspace::files().unwrap() {
            if !file.starts_with(&sources) || file.extension().is_none_or(|e| e != "rs") {
                continue;
            }
            let source = std::fs::read_to_string(workspace::root().join(&file)).unwrap();
            for (number, line) in crate::tidy::lines_before_tests(&source).enumerate() {
                let code = line.split("//").next().unwrap_or_default();
                for name in never.iter().filter(|name| code.contains(**name)) {
                    wrong.push(format!("{}:{}: {name}", file.display(), number + 1));
                }
            }
        }
    }
    wrong
}

/// Package id to name, of the workspace's crates.
fn members(metadata: &Value) -> BTreeMap<&str, &str> {
    let ids: BTreeSet<&str> =
        list(metadata, "workspace_members").iter().filter_map(Value::as_str).collect();
    let packages = list(metadata, "packages").iter();
    packages
        .map(|package| (text(package, "id"), text(package, "name")))
        .filter(|(id, _)| ids.contains(id))
        .collect()
}

/// Normal and build dependencies as cargo resolved them.
struct Graph<'a> {
    names: BTreeMap<&'a str, &'a str>,
    arrows: BTreeMap<&'a str, Vec<&'a str>>,
}

impl<'a> Graph<'a> {
    fn of(metadata: &'a Value) -> Self {
        let packages = list(metadata, "packages").iter();
        let names = packages.map(|p| (text(p, "id"), text(p, "name"))).collect();
        let mut arrows = BTreeMap::new();
        for node in metadata.get("resolve").map_or(&[][..], |resolve| list(resolve, "nodes")) {
            let shipped = |dep: &&Value| {
                list(dep, "dep_kinds").iter().any(|kind| text(kind, "kind") != "dev")
            };
            let to = list(node, "deps").iter().filter(shipped).map(|dep| text(dep, "pkg"));
            arrows.insert(text(node, "id"), to.collect());
        }
        Self { names, arrows }
    }

    /// Every crate that `from` is built from, with a way there.
    fn reachable(&self, from: &'a str) -> BTreeMap<&'a str, Vec<&'a str>> {
        let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let mut open = vec![(from, Vec::new())];
        while let Some((id, way)) = open.pop() {
            for to in self.arrows.get(id).into_iter().flatten() {
                let Some(name) = self.names.get(to) else { continue };
                if found.contains_key(name) {
                    continue;
                }
                let mut way = way.clone();
                way.push(*name);
                found.insert(name, way.clone());
                open.push((to, way));
            }
        }
        found
    }
}
