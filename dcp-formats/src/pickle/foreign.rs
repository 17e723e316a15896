//! Classifies the names that Python imports when it loads a pickle.
//!
//! Loading a pickle calls what it names. dcp calls nothing, but a rewritten pickle carries the
//! names to the next Python. So names are classified: those in checkpoints of PyTorch, OLMo-core
//! and Megatron-Core, those that can take over a machine, and unknown ones.

use dcp_core::format::IndexCallable;
use std::fmt;

use super::arena::{Construction, GlobalName, Node, NodeId, Pickle};
use super::harmless_names::HARMLESS;
use super::visitor::Visitor;

/// The classification of a name that Python imports and calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Trust {
    /// A call with any arguments creates a value and has no other effect.
    Harmless,
    /// Unknown: most likely a class of the training program.
    Unknown,
    /// It runs commands or code, or gives access to what does.
    Dangerous,
}

impl Trust {
    /// Classifies `name` in `module`, both of Python 3, for any kind of call.
    #[must_use]
    pub fn of(module: &str, name: &str) -> Self {
        if is_harmless(module, name) {
            Self::Harmless
        } else if is_dangerous(module, name) {
            Self::Dangerous
        } else {
            Self::Unknown
        }
    }

    /// Classifies a class whose instances are created without calling it.
    #[must_use]
    pub fn of_instances(module: &str, name: &str) -> Self {
        if is_in(INSTANCES, module, name) { Self::Harmless } else { Self::of(module, name) }
    }
}

/// A name in a pickle that is not known to be harmless.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForeignName {
    /// The module, as in Python 3.
    pub module: String,
    /// The name in the module.
    pub name: String,
    /// The path of its first occurrence in the object: keys and positions, joined by dots; empty
    /// for the object itself. `None` where Python discards the value it builds.
    pub path: Option<String>,
    /// Its classification; never [`Trust::Harmless`].
    pub trust: Trust,
}

impl ForeignName {
    /// Classifies `name` in `module`, found at `path`; `None` when it is harmless.
    #[must_use]
    pub fn new(module: &str, name: &str, path: Option<String>) -> Option<Self> {
        Self::with(Trust::of(module, name), module, name, path)
    }

    fn with(trust: Trust, module: &str, name: &str, path: Option<String>) -> Option<Self> {
        let (module, name) = (module.to_owned(), name.to_owned());
        (trust != Trust::Harmless).then_some(Self { module, name, path, trust })
    }
}

impl ForeignName {
    /// Returns this one as a callable of an index.
    pub(crate) fn callable(&self) -> IndexCallable {
        IndexCallable::new(self.to_string(), self.path.clone(), self.trust == Trust::Dangerous)
    }
}

impl fmt::Display for ForeignName {
    /// `module.name`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.module, self.name)
    }
}

impl Pickle<'_> {
    /// Whether Python imports anything that is not known to be harmless.
    #[must_use]
    pub fn has_foreign_names(&self) -> bool {
        let mut globals = (0..).zip(self.globals());
        globals.any(|(number, global)| self.trust(number, global) != Trust::Harmless)
    }

    /// Classifies a name by its uses in this pickle.
    fn trust(&self, number: u32, global: &GlobalName<'_>) -> Trust {
        let (module, name) = (&*global.module, &*global.name);
        if is_in(INSTANCES, module, name) && !self.is_called(number) {
            return Trust::Harmless;
        }
        if (module, name) == ("builtins", "getattr") && self.only_gets_known(number) {
            return Trust::Harmless;
        }
        Trust::of(module, name)
    }

    /// Whether a class is called, or passed to something that may call it.
    fn is_called(&self, number: u32) -> bool {
        let is_it = |id: NodeId| matches!(self.node(id), Node::Global(of) if *of == number);
        let called = self.objects.iter().any(|object| {
            let instance = object.construction == Construction::New
                && self.tuple(object.args).is_empty()
                && self.kwargs(object).is_none();
            is_it(object.class) && !instance || object.state.is_some_and(is_it)
        });
        called || self.pool.iter().any(|id| is_it(*id)) || is_it(self.root())
    }

    /// Every name that Python imports and that is not known to be harmless, whether or not the
    /// object still contains its value.
    #[must_use]
    pub fn foreign_names(&self) -> Vec<ForeignName> {
        if !self.has_foreign_names() {
            return Vec::new();
        }
        let walk = Visitor::new(self, self.root());
        let mut paths: Vec<Option<String>> = vec![None; self.globals().len()];
        for id in walk.nodes() {
            if let Node::Global(number) = self.node(id)
                && let Some(path) = paths.get_mut(*number as usize)
            {
                *path = Some(walk.path_to(self, id));
            }
        }
        let named = (0..).zip(self.globals()).zip(paths);
        let foreign = named.filter_map(|((number, global), path)| {
            let trust = self.trust(number, global);
            ForeignName::with(trust, &global.module, &global.name, path)
        });
        foreign.collect()
    }
}

fn is_in(list: &[(&str, &[&str])], module: &str, name: &str) -> bool {
    list.iter().any(|(known, names)| *known == module && names.contains(&name))
}

fn is_harmless(module: &str, name: &str) -> bool {
    let listed = is_in(HARMLESS, module, name);
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let of_torch = || match module {
        "torch" => name.ends_with("Storage") || name.parse::<dcp_core::DType>().is_ok(),
        "torch.cuda" | "torch.storage" => name.ends_with("Storage"),
        // `_rebuild_tensor_v2` and similar functions.
        "torch._utils" => name.starts_with("_rebuild_"),
        "numpy.dtypes" => name.ends_with("DType"),
        // `signal.SIGTERM`: Python pickles enumerations of the system this way since 3.12.
        "signal" => name.starts_with("SIG"),
        // Modules that were saved whole.
        _ => {
            module.starts_with("torch.nn.modules.")
                && name.starts_with(|first: char| first.is_ascii_uppercase())
        }
    };
    listed || plain && of_torch()
}

/// Classes that are harmless only without a call: `NEWOBJ` without arguments, and a state.
///
/// A call of `DeviceMesh` with a mesh starts the process group of the environment and joins its
/// network. Its `__setstate__` sets attributes and finds groups by name.
const INSTANCES: &[(&str, &[&str])] = &[("torch.distributed.device_mesh", &["DeviceMesh"])];

fn is_dangerous(module: &str, name: &str) -> bool {
    let top = module.split('.').next().unwrap_or(module);
    let listed = is_in(DANGEROUS, module, name);
    // A dotted name can reach into any module.
    let through = name.split('.').any(|part| DANGEROUS_MODULES.contains(&part));
    DANGEROUS_MODULES.contains(&top) || listed || through
}

/// Modules whose every name may run commands or code, open files, or use the network.
const DANGEROUS_MODULES: &[&str] = &[
    "_posixsubprocess",
    "_pickle",
    "_thread",
    "asyncio",
    "bdb",
    "cProfile",
    "cffi",
    "cloudpickle",
    "code",
    "codeop",
    "commands",
    "ctypes",
    "_ctypes",
    "dill",
    "distutils",
    "doctest",
    "ensurepip",
    "ftplib",
    "http",
    "idlelib",
    "imp",
    "importlib",
    "_frozen_importlib",
    "_frozen_importlib_external",
    "joblib",
    "lib2to3",
    "linecache",
    "marshal",
    "multiprocessing",
    "nt",
    "os",
    "paramiko",
    "pdb",
    "pickle",
    "pip",
    "pkgutil",
    "popen2",
    "posix",
    "profile",
    "pty",
    "pydoc",
    "requests",
    "runpy",
    "setuptools",
    "shelve",
    "shutil",
    "site",
    "smtplib",
    "socket",
    "_socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "sys",
    "telnetlib",
    "tempfile",
    "threading",
    "timeit",
    "trace",
    "urllib",
    "urllib2",
    "venv",
    "webbrowser",
    "zipimport",
];

/// Dangerous names of modules that also have harmless ones.
const DANGEROUS: &[(&str, &[&str])] = &[
    (
        "builtins",
        &[
            "__import__",
            "apply",
            "breakpoint",
            "compile",
            "delattr",
            "eval",
            "exec",
            "execfile",
            "file",
            "getattr",
            "globals",
            "help",
            "input",
            "locals",
            "map",
            "open",
            "setattr",
            "vars",
        ],
    ),
    ("io", &["FileIO", "open", "open_code"]),
    ("_io", &["FileIO", "open", "open_code"]),
    ("functools", &["partial", "reduce"]),
    ("operator", &["attrgetter", "itemgetter", "methodcaller"]),
    ("_operator", &["attrgetter", "itemgetter", "methodcaller"]),
    ("types", &["CodeType", "FunctionType", "LambdaType", "MethodType"]),
    ("numpy", &["fromfile", "load", "memmap", "save"]),
    ("numpy.testing._private.utils", &["runstring"]),
    ("torch", &["compile", "load"]),
    ("torch.hub", &["load", "load_state_dict_from_url", "download_url_to_file"]),
    ("torch.jit", &["load"]),
    ("torch.serialization", &["load"]),
    // Loads another pickle.
    ("torch.storage", &["_load_from_bytes"]),
    ("torch.utils.cpp_extension", &["load", "load_inline"]),
];

#[cfg(test)]
mod tests {
    use super::super::Limits;
    use super::*;

    fn names(pickle: &[u8]) -> Vec<(String, Option<String>, Trust)> {
        let pickle = Pickle::parse(pickle, &Limits::DEFAULT).unwrap();
        let names = pickle.foreign_names().into_iter();
        names.map(|name| (name.to_string(), name.path, name.trust)).collect()
    }

    #[test]
    fn names_are_found_wherever_they_hide() {
        let found = |pickle: &[u8], name: &str, path: Option<&str>, trust| {
            let expected = (name.to_owned(), path.map(str::to_owned), trust);
            assert_eq!(names(pickle), [expected], "{}", String::from_utf8_lossy(pickle));
        };
        // {"args": {"hooks": [os.system("x")]}}
        found(
            b"}(X\x04\0\0\0args}(X\x05\0\0\0hooks](cos\nsystem\nX\x01\0\0\0x\x85Reuu.",
            "os.system",
            Some("args.hooks.0"),
            Trust::Dangerous,
        );
        // The same, called and thrown away.
        found(b"cposix\nsystem\nX\x01\0\0\0x\x85R0K\x01.", "posix.system", None, Trust::Dangerous);
        // Named, not called.
        found(b"cmy.code\nrun\n.", "my.code.run", Some(""), Trust::Unknown);
        // As a key, and as the state of an object.
        found(b"}cmy\nKey\nK\x01s.", "my.Key", Some(""), Trust::Unknown);
        found(
            b"cargparse\nNamespace\n)\x81}X\x01\0\0\0fcbuiltins\neval\nsb.",
            "builtins.eval",
            Some("f"),
            Trust::Dangerous,
        );
        // Python 2's name of it, and one by way of a harmless module.
        found(b"c__builtin__\neval\n.", "builtins.eval", Some(""), Trust::Dangerous);
        let dotted = b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.";
        found(dotted, "torch.os.system", Some(""), Trust::Dangerous);
        assert_eq!(names(b"ccollections\nOrderedDict\n)R."), []);
    }

    /// Python 3.11 pickles members of enumerations so, as in a `ShardedTensor` of FSDP1.
    #[test]
    fn getattr_is_harmless_for_members_of_enumerations_and_a_nested_class_alone() {
        const CLASS: &str =
            "ctorch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING\n";
        const SHARDED: &str = "ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n";
        let dangers = |class: &str, name: &str, rest: &[u8]| {
            let len = char::from(u8::try_from(name.len()).unwrap());
            let call = format!("cbuiltins\ngetattr\n({class}X{len}\0\0\0{name}tR");
            let found = names(&[call.as_bytes(), rest, b"."].concat());
            found.iter().filter(|(_, _, trust)| *trust == Trust::Dangerous).count()
        };
        assert_eq!(dangers(CLASS, "TORCH_CONTIGUOUS_FORMAT", b""), 0);
        assert_eq!(dangers(CLASS, "mro", b""), 1);
        assert_eq!(dangers(CLASS, "__class__", b""), 1);
        assert_eq!(dangers("ctorch\nFloatStorage\n", "FROM", b""), 1);
        assert_eq!(dangers(SHARDED, "ProcessGroupState", b""), 0);
        // Made without a call, with a state.
        assert_eq!(dangers(SHARDED, "ProcessGroupState", b")\x81}b"), 0);
        for name in ["ProcessGroupState.__init__", "ProcessGroup", "PROCESS", "__init__", "mro"] {
            assert_eq!(dangers(SHARDED, name, b""), 1, "{name}");
        }
        assert_eq!(dangers(CLASS, "ProcessGroupState", b""), 1);
        assert_eq!(dangers("ctorch.distributed\nShardedTensor\n", "ProcessGroupState", b""), 1);
        assert_eq!(dangers(SHARDED, "ProcessGroupState", b"0cbuiltins\ngetattr\n"), 1);
        assert_eq!(dangers(CLASS, "FORMAT", b"0cbuiltins\ngetattr\n"), 1);
        assert_eq!(dangers(CLASS, "FORMAT", b"(cbuiltins\ngetattr\nt"), 1);
    }

    #[test]
    fn a_mesh_is_harmless_where_it_is_not_called() {
        const MESH: &[u8] = b"ctorch.distributed.device_mesh\nDeviceMesh\n";
        let pickled = |rest: &[u8]| names(&[MESH, rest].concat()).len();
        // NEWOBJ with nothing, and a state; called; NEWOBJ with something; alone.
        assert_eq!(pickled(b")\x81}b."), 0);
        assert_eq!(pickled(b")R."), 1);
        assert_eq!(pickled(b"K\x01\x85\x81."), 1);
        assert_eq!(pickled(b"."), 1);
        // Called and thrown away, and by another function.
        assert_eq!(names(&[MESH, b")R0", MESH, b")\x81."].concat()).len(), 1);
        let by_another = [b"ctorch._tensor\n_rebuild_from_type_v2\n(", MESH, b"tR."].concat();
        assert_eq!(names(&by_another).len(), 1);
    }

    #[test]
    fn an_object_that_holds_itself_is_looked_at_once() {
        assert_eq!(names(b"]q\0h\0acos\nsystem\na.").len(), 1);
    }

    #[test]
    fn only_exact_names_are_harmless() {
        for (module, name, trust) in [
            ("torch", "bfloat16", Trust::Harmless),
            ("torch", "FloatStorage", Trust::Harmless),
            ("torch", "os.Storage", Trust::Dangerous),
            ("torch._utils", "_rebuild_tensor_v2", Trust::Harmless),
            ("torch._utils", "_rebuild_x.os.system", Trust::Dangerous),
            ("torch.nn.modules.linear", "Linear", Trust::Harmless),
            ("torch.nn.modules.linear", "Linear.forward", Trust::Unknown),
            ("torch.nn.modules.module", "warnings", Trust::Unknown),
            ("signal", "SIGTERM", Trust::Harmless),
            ("signal", "signal", Trust::Unknown),
            ("torch.storage", "_load_from_bytes", Trust::Dangerous),
            ("builtins", "getattr", Trust::Dangerous),
            ("os.path", "join", Trust::Dangerous),
            ("osmosis", "Osmosis", Trust::Unknown),
            ("", "", Trust::Unknown),
        ] {
            assert_eq!(Trust::of(module, name), trust, "{module}.{name}");
        }
    }
}
