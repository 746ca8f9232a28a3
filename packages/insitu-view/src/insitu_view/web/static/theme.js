// Applies the stored colour scheme before the first paint.
try {
  const theme = localStorage.getItem("insitu.theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // Storage is off: the scheme of the system applies.
}
