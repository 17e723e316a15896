//! Methods of a [`Storage`](super::Storage) that pass the call on to another one.

/// Implements methods of [`Storage`](crate::Storage) for a decorator: each passes the call on to the
/// same method of a field.
///
/// The trait has no default methods, so a decorator names every method: those that it changes it
/// implements, and those that it passes on it lists here. A method that is added to the trait
/// therefore fails to compile in every decorator, until its author has decided. A call costs nothing
/// beyond the call of the field: the future of the inner storage is returned as it is.
///
/// The first argument is the field, or a path of fields such as `0.inner`. It may be an
/// `Arc<dyn Storage>` or a storage itself.
///
/// ```
/// use std::sync::Arc;
///
/// use async_trait::async_trait;
/// use dcp_core::storage::{PutMode, ReadOutcome, ReadRequest};
/// use dcp_core::error::StorageOp;
/// use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};
///
/// /// A storage without its `put`: what exists stays as it is.
/// #[derive(Debug)]
/// struct ReadOnly {
///     inner: Arc<dyn Storage>,
/// }
///
/// #[async_trait]
/// impl Storage for ReadOnly {
///     dcp_core::forward_storage!(
///         inner: capabilities, stat, read, read_whole, start_upload, list, list_folder, delete,
///         claim, leftovers, remove_empty_folders
///     );
///
///     async fn put(
///         &self,
///         key: &Key,
///         _: Payload,
///         _: PutMode,
///     ) -> Result<dcp_core::storage::ObjectMeta, StorageError> {
///         let (kind, op) = (StorageErrorKind::Denied, StorageOp::Put);
///         Err(StorageError::new(kind, op, Some(key.clone())))
///     }
/// }
/// ```
#[macro_export]
macro_rules! forward_storage {
    ($($field:tt).+ : $($methods:tt)*) => {
        $crate::forward_storage!(@each [$($field).+] $($methods)*);
    };
    (@each $field:tt $($method:ident),* $(,)?) => {
        $($crate::forward_storage!(@method $method $field);)*
    };
    (@method capabilities [$($field:tt)+]) => {
        fn capabilities(&self) -> $crate::storage::Capabilities {
            self.$($field)+.capabilities()
        }
    };
    (@method list [$($field:tt)+]) => {
        fn list(
            &self,
            folder: ::std::option::Option<&$crate::Key>,
        ) -> $crate::storage::ObjectStream {
            self.$($field)+.list(folder)
        }
    };
    (@method list_folder [$($field:tt)+]) => {
        fn list_folder(
            &self,
            folder: ::std::option::Option<&$crate::Key>,
        ) -> $crate::storage::FolderStream {
            self.$($field)+.list_folder(folder)
        }
    };
    (@method stat $field:tt) => {
        $crate::forward_storage!(@future $field stat(key: &'a $crate::Key)
            -> $crate::storage::ObjectMeta);
    };
    (@method read $field:tt) => {
        $crate::forward_storage!(@future $field read(
            key: &'a $crate::Key,
            request: $crate::storage::ReadRequest
        ) -> $crate::storage::ReadOutcome);
    };
    (@method read_whole $field:tt) => {
        $crate::forward_storage!(@future $field read_whole(
            key: &'a $crate::Key,
            max_bytes: u64
        ) -> $crate::storage::WholeObject);
    };
    (@method put $field:tt) => {
        $crate::forward_storage!(@future $field put(
            key: &'a $crate::Key,
            payload: $crate::Payload,
            mode: $crate::storage::PutMode
        ) -> $crate::storage::ObjectMeta);
    };
    (@method start_upload $field:tt) => {
        $crate::forward_storage!(@future $field start_upload(
            key: &'a $crate::Key,
            options: $crate::storage::UploadOptions
        ) -> ::std::boxed::Box<dyn $crate::storage::Upload>);
    };
    (@method delete $field:tt) => {
        $crate::forward_storage!(@future $field delete(keys: &'a [$crate::Key]) -> ());
    };
    (@method claim $field:tt) => {
        $crate::forward_storage!(@future $field claim(key: &'a $crate::Key)
            -> ::std::sync::Arc<dyn $crate::storage::Claim>);
    };
    (@method leftovers $field:tt) => {
        $crate::forward_storage!(@future $field leftovers(
            folder: ::std::option::Option<&'a $crate::Key>,
            min_age: ::std::time::Duration,
            action: $crate::storage::LeftoverAction
        ) -> ::std::vec::Vec<$crate::storage::Leftover>);
    };
    (@method remove_empty_folders $field:tt) => {
        $crate::forward_storage!(@future $field remove_empty_folders(folder: &'a $crate::Key) -> ());
    };
    // The signature that `async_trait` gives the methods of the trait.
    (@future [$($field:tt)+] $method:ident($($arg:ident: $type:ty),*) -> $output:ty) => {
        fn $method<'this, 'a, 'future>(
            &'this self,
            $($arg: $type),*
        ) -> ::std::pin::Pin<::std::boxed::Box<
            dyn ::std::future::Future<
                Output = ::std::result::Result<$output, $crate::StorageError>,
            > + ::std::marker::Send + 'future,
        >>
        where
            'this: 'future,
            'a: 'future,
            Self: 'future,
        {
            self.$($field)+.$method($($arg),*)
        }
    };
}
