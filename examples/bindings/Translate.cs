// mcs Translate.cs; or a .NET project of this one file. libtformer.so must be where the loader looks.
// LD_LIBRARY_PATH=... TFORMER_ONNXRUNTIME=.../libonnxruntime.so.1.31.1 mono Translate.exe BUNDLE LINE...
using System;
using System.Collections.Generic;
using System.Linq;
using System.Runtime.InteropServices;
using System.Text;

static class Tformer
{
    [StructLayout(LayoutKind.Sequential)] public struct Text { public IntPtr Data; public UIntPtr Size; }

    [StructLayout(LayoutKind.Sequential)] public struct Output
    {
        public IntPtr Text; public UIntPtr TextSize; public IntPtr Ids; public UIntPtr IdsSize; public IntPtr Alignment;
        public double Score, Value; public int Finished;
    }

    const string Library = "libtformer.so";
    [DllImport(Library)] public static extern IntPtr tformer_error();
    [DllImport(Library)] public static extern IntPtr tformer_options_new();
    [DllImport(Library)] public static extern int tformer_options_set(IntPtr options, byte[] name, byte[] value);
    [DllImport(Library)] public static extern void tformer_options_free(IntPtr options);
    [DllImport(Library)] public static extern int tformer_model_open(byte[] folder, IntPtr options, out IntPtr model);
    [DllImport(Library)] public static extern void tformer_model_close(IntPtr model);
    [DllImport(Library)] public static extern int tformer_translator_new(IntPtr model, IntPtr options, out IntPtr made);
    [DllImport(Library)] public static extern void tformer_translator_free(IntPtr translator);
    [DllImport(Library)] public static extern int tformer_translate(
        IntPtr translator, Text[] lines, IntPtr prefixes, UIntPtr count, ulong first, out IntPtr results);
    [DllImport(Library)] public static extern IntPtr tformer_results_output(IntPtr results, UIntPtr line, UIntPtr k);
    [DllImport(Library)] public static extern void tformer_results_free(IntPtr results);

    public static byte[] Utf8(string text) => Encoding.UTF8.GetBytes(text + "\0");
    public static string From(IntPtr text)  // which ends in a zero byte
    {
        var bytes = new List<byte>();
        for (byte each; (each = Marshal.ReadByte(text, bytes.Count)) != 0;) bytes.Add(each);
        return Encoding.UTF8.GetString(bytes.ToArray());
    }
    public static void Require(int status) { if (status != 0) throw new Exception(From(tformer_error())); }
}

static class Program
{
    static int Main(string[] given)
    {
        IntPtr model = IntPtr.Zero, translator = IntPtr.Zero, results = IntPtr.Zero;
        var options = Tformer.tformer_options_new();
        var pinned = given.Skip(1)
            .Select(line => GCHandle.Alloc(Encoding.UTF8.GetBytes(line), GCHandleType.Pinned)).ToList();
        try
        {
            Tformer.Require(Tformer.tformer_options_set(options, Tformer.Utf8("beams"), Tformer.Utf8("4")));
            Tformer.Require(Tformer.tformer_model_open(Tformer.Utf8(given[0]), options, out model));
            Tformer.Require(Tformer.tformer_translator_new(model, options, out translator));
            var lines = pinned.Select(each => new Tformer.Text
            {
                Data = each.AddrOfPinnedObject(), Size = (UIntPtr)((byte[])each.Target).Length
            }).ToArray();
            Tformer.Require(Tformer.tformer_translate(
                translator, lines, IntPtr.Zero, (UIntPtr)lines.Length, 0, out results));
            for (var line = 0; line < lines.Length; line++)
            {
                var at = Tformer.tformer_results_output(results, (UIntPtr)line, UIntPtr.Zero);
                var best = Marshal.PtrToStructure<Tformer.Output>(at);
                Console.WriteLine(FormattableString.Invariant($"{best.Score:F4}\t{Tformer.From(best.Text)}"));
            }
            return 0;
        }
        catch (Exception error) { Console.Error.WriteLine(error.Message); return 1; }
        finally
        {
            Tformer.tformer_results_free(results);
            Tformer.tformer_translator_free(translator);
            Tformer.tformer_model_close(model);
            Tformer.tformer_options_free(options);
            pinned.ForEach(each => each.Free());
        }
    }
}
