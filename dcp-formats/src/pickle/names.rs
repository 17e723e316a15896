//! Names of Python 2, which protocols 0 to 2 still use (`fix_imports`).

/// Module and name.
type Name = (&'static str, &'static str);

/// Names that moved individually, among those in pickled data.
const NAMES: &[(Name, Name)] = &[
    (("__builtin__", "xrange"), ("builtins", "range")),
    (("__builtin__", "unicode"), ("builtins", "str")),
    (("__builtin__", "long"), ("builtins", "int")),
    (("__builtin__", "unichr"), ("builtins", "chr")),
    (("__builtin__", "reduce"), ("functools", "reduce")),
    (("__builtin__", "intern"), ("sys", "intern")),
    (("itertools", "izip"), ("builtins", "zip")),
    (("itertools", "imap"), ("builtins", "map")),
    (("itertools", "ifilter"), ("builtins", "filter")),
    (("itertools", "ifilterfalse"), ("itertools", "filterfalse")),
    (("itertools", "izip_longest"), ("itertools", "zip_longest")),
    (("UserDict", "IterableUserDict"), ("collections", "UserDict")),
    (("UserList", "UserList"), ("collections", "UserList")),
    (("UserString", "UserString"), ("collections", "UserString")),
];

/// Modules that moved as a whole, among those in pickled data.
const MODULES: &[(&str, &str)] = &[
    ("__builtin__", "builtins"),
    ("exceptions", "builtins"),
    ("copy_reg", "copyreg"),
    ("cPickle", "pickle"),
    ("cStringIO", "io"),
    ("StringIO", "io"),
    ("Queue", "queue"),
    ("ConfigParser", "configparser"),
    ("thread", "_thread"),
    ("repr", "reprlib"),
    ("_abcoll", "collections.abc"),
];

/// Translates a stored name to Python 3.
pub(super) fn to_python3<'a>(module: &'a str, name: &'a str) -> (&'a str, &'a str) {
    if let Some((_, new)) = NAMES.iter().find(|(old, _)| *old == (module, name)) {
        return *new;
    }
    let moved = MODULES.iter().find(|(old, _)| *old == module);
    (moved.map_or(module, |(_, new)| new), name)
}

/// Translates a name of Python 3 to what protocol 2 stores.
///
/// Translates built-ins and `copyreg` only: no other name of the tables occurs in pickles that dcp
/// writes.
pub(super) fn to_python2<'a>(module: &'a str, name: &'a str) -> (&'a str, &'a str) {
    match (module, name) {
        ("builtins", "range") => ("__builtin__", "xrange"),
        ("builtins", "str") => ("__builtin__", "unicode"),
        ("builtins", "int") => ("__builtin__", "long"),
        ("builtins", "chr") => ("__builtin__", "unichr"),
        ("builtins", "zip") => ("itertools", "izip"),
        ("builtins", "map") => ("itertools", "imap"),
        ("builtins", "filter") => ("itertools", "ifilter"),
        // In Python 2 these names had another meaning.
        ("builtins", _) if NAMES.iter().any(|(old, _)| *old == ("__builtin__", name)) => {
            (module, name)
        }
        ("builtins", _) => ("__builtin__", name),
        ("copyreg", _) => ("copy_reg", name),
        _ => (module, name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f11_python_2_names_are_mapped() {
        assert_eq!(to_python3("__builtin__", "xrange"), ("builtins", "range"));
        assert_eq!(to_python3("__builtin__", "set"), ("builtins", "set"));
        assert_eq!(to_python3("copy_reg", "_reconstructor"), ("copyreg", "_reconstructor"));
        assert_eq!(to_python3("torch", "float32"), ("torch", "float32"));
        for (module, name) in [("builtins", "set"), ("builtins", "range"), ("torch", "Size")] {
            let (old_module, old_name) = to_python2(module, name);
            assert_eq!(to_python3(old_module, old_name), (module, name));
        }
    }
}
