/** The theme that the user chose, set before anything is drawn; app.js has the button. */
{
  const theme = localStorage.getItem("ssd.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
